"""Pages that hold what others wrote: their text stays text, whatever it is."""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

CHARSET = '<meta charset="utf-8">'
ELEMENT = re.compile(r'<(script|style)(?: type="module")?>(.*?)</\1>', re.DOTALL)


def as_data(values: Mapping[str, Any]) -> str:
    r"""Return values as JSON that may stand in a page: no text in it can end an element.

    JSON has no word for what is no number, such as a loss that ran away: it becomes null.

    >>> as_data({"name": "</script>", "loss": float("nan")})
    '{"name": "\\u003c/script>", "loss": null}'
    """
    known = json.loads(json.dumps(values), parse_constant=lambda _: None)
    return json.dumps(known).replace("<", "\\u003c")


def with_policy(page: str) -> str:
    """Return a page that runs and wears what it holds now, and nothing that is brought in later.

    The browser compares each script and style with the digests written here, and fetches nothing:
    should a name find its way into the page as markup in spite of all care, it stays dead.
    """
    assert CHARSET in page
    found = ELEMENT.findall(page)
    scripts = _sources(content for kind, content in found if kind == "script")
    styles = _sources(content for kind, content in found if kind == "style")
    policy = (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    return page.replace(CHARSET, f"{CHARSET}\n{meta}", 1)


def _sources(contents: Iterable[str]) -> str:
    digests = (hashlib.sha256(content.encode()).digest() for content in contents)
    return " ".join(f"'sha256-{base64.b64encode(d).decode()}'" for d in digests) or "'none'"
