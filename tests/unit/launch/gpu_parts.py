"""Measurements for the tests of the frame: one that is right, and those that go wrong in some way."""

from launch.bench.gpu.figures import Figure, Measurement, Options


def right(options: Options) -> list[Figure]:
    return [
        Figure(of="a", name="time", value=2.5, unit="ms", target="at most 3 ms", holds=True),
        Figure(of=str(options.device), name="small", value=str(options.small)),
    ]


def missed(_: Options) -> list[Figure]:
    return [Figure(of="b", name="time", value=4.0, unit="ms", target="at most 3 ms", holds=False)]


def raising(_: Options) -> list[Figure]:
    print("before the error")
    raise ValueError("a | message")


MEASUREMENTS: dict[str, Measurement] = {"right": right, "missed": missed, "raising": raising}
