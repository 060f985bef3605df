"""Teams as data: built-in YAML files, the format pool, and the code that renders a view."""

from optima_lite.teams.team import (
    BUILT_IN,
    Message,
    check_fits,
    load_formats,
    load_team,
    prompt_for,
    view,
)

__all__ = [
    "BUILT_IN",
    "Message",
    "check_fits",
    "load_formats",
    "load_team",
    "prompt_for",
    "view",
]
