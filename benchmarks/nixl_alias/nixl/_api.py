"""The API of whichever NIXL wheel is installed."""

try:
    from nixl_cu12._api import *  # noqa: F403
except ImportError:
    from nixl_cu13._api import *  # noqa: F403
