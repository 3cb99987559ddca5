"""The link that lets a browser in: it works once, then there is another."""

import hmac
import secrets
from collections.abc import Callable


class Entry:
    """Holds the only token that is good at a time, and nothing of those that were used."""

    def __init__(self, base: str, tell: Callable[[str], None]) -> None:
        """Make the first token.

        Args:
            base: the page's address, without a slash at the end.
            tell: is told every further link.
        """
        self._base = base
        self._tell = tell
        self._token = secrets.token_urlsafe(32)

    @property
    def link(self) -> str:
        """Return the link that is good now."""
        return f"{self._base}/enter?token={self._token}"

    def spend(self, token: str) -> bool:
        """Tell whether this is the token; if so, it is void from now on."""
        if not hmac.compare_digest(token.encode(errors="replace"), self._token.encode()):
            return False
        self._token = secrets.token_urlsafe(32)
        self._tell(self.link)
        return True
