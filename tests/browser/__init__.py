"""What a person sees of a run in a browser: a headless Chromium opens real pages."""
