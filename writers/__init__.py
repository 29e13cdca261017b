"""The writers that ship with rlio, found the same way as anybody else's."""

if __name__ != "rlio.writers":
    raise ImportError(
        f"this package was imported as {__name__!r}; it is installed as 'rlio.writers': "
        "write 'import rlio.writers' and keep the checkout's root off sys.path"
    )
