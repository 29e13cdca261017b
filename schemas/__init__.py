"""The schemas that ship with rlio, found the same way as anybody else's."""

if __name__ != "rlio.schemas":
    raise ImportError(
        f"this package was imported as {__name__!r}; it is installed as 'rlio.schemas': "
        "write 'import rlio.schemas' and keep the checkout's root off sys.path"
    )
