"""Convert RLlib's JSON recordings (or anything else that rlio reads) into an rlio data set.

Run:  python examples/convert_rllib.py 'old/*.json' runs/converted
"""

import sys

import rlio


def main(source: str, folder: str) -> None:
    """Copy every row once, then show the result."""
    # RecordingInput wraps a reader and a writer: to convert a format, record a replay.
    with rlio.RecordingInput(rlio.read(source, epochs=1), rlio.ParquetWriter(folder)) as reader:
        rows = sum(len(batch) for batch in reader)
    data = rlio.open_dataset(folder)
    print(f"{rows} rows, {data.bytes()} bytes, columns {', '.join(data.columns['default_policy'])}")
    for episode in data.episodes[:3]:
        print(f"episode {episode['eps_id']}: {episode['length']} steps, return {episode['return']}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
