"""The live page of a run: a server that reads its events, and the page that shows them."""
