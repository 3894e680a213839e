"""The speed tables of older versions of torchgpipe, with what their records do not say and a prediction needs.

From the repository's history (kakaobrain/torchgpipe, `examples` and `docs/changelog.rst`): the models; that the
fake data had 50,000 samples, trained in whole epochs or, in ResNet-101's program of 0.0.3, in whole mini-batches; and
which parts a version had. Copies got streams of their own on 2019-08-30 (246bd03, in 0.0.3), skips got portals in
0.0.5. AmoebaNet-D's table in 0.0.3 is of 2019-08-02 (2535a5a), before these streams.
"""

from __future__ import annotations

from dataclasses import dataclass

from reproduce.records.decode import Json

__all__ = ["OLDER", "Older"]

SAMPLES = 50_000


@dataclass(frozen=True)
class Older:
    """A published table, the model that it is of, and the parts that its version had."""

    table: str
    model: dict[str, Json]
    components: tuple[str, ...]
    whole_epochs: bool = True

    def completed(self, config: dict[str, Json]) -> dict[str, Json]:
        """Return the configuration of a row with all that a prediction needs."""
        fixed = {"input_shape": [3, 224, 224], "optimizer": "SGD", "momentum": 0.0}
        more: dict[str, Json] = {**self.model, **fixed, "components": list(self.components)}
        if self.whole_epochs:
            steps, rest = divmod(SAMPLES, config["batch_size"])
            more |= {"steps_per_epoch": steps + (rest > 0), "last_batch_size": rest or config["batch_size"]}
        return {**config, **more}


AMOEBANET = {"model": "older AmoebaNet-D", "L": 4, "F": 512}

OLDER = {
    "resnet101-v0.0.2": Older("tg-history-resnet101-speed-v0.0.2", {"model": "older ResNet-101"}, ("dependency",)),
    "resnet101-v0.0.3": Older(
        "tg-history-resnet101-speed-v0.0.3", {"model": "ResNet-101"}, ("dependency", "streams"), whole_epochs=False
    ),
    "amoebanet-v0.0.3": Older("tg-history-amoebanetd-speed-v0.0.3", AMOEBANET, ("dependency",)),
    "amoebanet-88ce76b": Older("tg-history-amoebanetd-speed-88ce76b", AMOEBANET, ("dependency", "streams")),
}
"""By experiment. Nothing in the prediction was chosen by these rows before it was first held against them."""
