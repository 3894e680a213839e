"""Check a model's sizes before any layer is built, so that the error names the argument."""

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
    """Raise an error unless a size is allowed.

    Args:
        name: The name of the caller's argument.
        value: The size. It must be a whole number.
        multiple_of: The size must be divisible by this number.
        least: The size must be at least this number.
        why: The reason for these rules, for the message.

    Raises:
        TypeError: If the size is no whole number.
        ValueError: If the size is not allowed. The message names the nearest allowed size.
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
