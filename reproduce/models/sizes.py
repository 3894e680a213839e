"""Check a model's sizes before any layer is built, so that an error names the wrong argument."""

ZOO = (
    "resnet18",
    "resnet50",
    "alexnet",
    "densenet121",
    "mobilenet_v3_large",
    "efficientnet_b0",
    "convnext_tiny",
    "vit_b_16",
    "swin_t",
    "regnet_y_1_6gf",
)


def check_size(
    name: str, value: int, *, multiple_of: int = 1, least: int = 1, why: str = ""
) -> None:
    """Raise an error if a size is not allowed.

    Args:
        name: The name of the caller's argument.
        value: The size. It must be an integer.
        multiple_of: The size must be divisible by this number.
        least: The size must be at least this number.
        why: The reason for these rules. The error message contains it.

    Raises:
        TypeError: The size is not an integer.
        ValueError: The size is not allowed. The message names the nearest allowed size.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be a whole number (int), got {value!r}")

    smallest = -(-least // multiple_of) * multiple_of
    if value >= smallest and value % multiple_of == 0:
        return

    rule = f"at least {smallest}" if multiple_of == 1 else f"a positive multiple of {multiple_of}"
    reason = f" ({why})" if why else ""
    rounded = round(value / multiple_of) * multiple_of
    nearest = max(smallest, rounded)
    raise ValueError(f"{name} must be {rule}{reason}, got {value}: use {nearest}, for example")
