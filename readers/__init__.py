"""The readers that ship with rlio, found the same way as anybody else's."""

if __name__ != "rlio.readers":
    raise ImportError(
        f"this package was imported as {__name__!r}; it is installed as 'rlio.readers': "
        "write 'import rlio.readers' and keep the checkout's root off sys.path"
    )
