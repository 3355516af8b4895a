"""vLLM's side of a flip: a weight-transfer engine that reads the staging file. Imported by vLLM's workers only.

States of one update (vLLM enforces the order, one at a time):

    idle ── start ──▶ open ── receive ──▶ loaded ── finish ──▶ compared (vllm_held.py) ──▶ idle
                        ├── manifest or file cannot be read ──▶ idle, still the old version
                        └── any other error, here or later ──▶ idle, weights undefined: serve nothing until an update succeeds

The staged bytes were compared with the manifest's digests just before (check_staged); here what the model holds is compared with them.

The loader keeps references to our tensors until their layer is complete, so the mapping lives until ``finish``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from hpcrl.weights.vllm_engine import StagedWeights
from hpcrl.weights.vllm_held import Watch, packed_kernels

__all__ = ["ShmInitInfo", "ShmUpdateInfo", "ShmWeightTransferEngine"]

logger = init_logger("vllm.hpcrl")  # below vLLM's own logger, so that its handlers apply


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """One version: ``manifest`` is a path or the JSON content, ``staging`` the file with the bytes."""

    manifest: str | dict[str, Any]
    staging: str


class ShmWeightTransferEngine(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    """Loads whole versions from a file in shared memory."""

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._staged: StagedWeights | None = None
        self._watch: Watch | None = None

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        """No rendezvous: the file is the channel."""

    def start_weight_update(self) -> None:
        """Nothing yet: the reload begins once the staged bytes are there."""
        self._staged = None

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        """Load the staged bytes.

        Raises DataError when they cannot be read: the model still holds the old version. Any later error leaves the
        weights undefined, but the loader ready for the next update.
        """
        self._staged = staged = StagedWeights.open(update_info.manifest, update_info.staging)
        model: Any = self.model
        packed = packed_kernels(model)
        initialize_layerwise_reload(model)
        self._watch = Watch(model, staged, packed)
        try:
            with self._watch:
                model.load_weights(iter(staged))
        except BaseException:
            # Close the reload: half-filled layers kept open would mix two versions in the next update.
            finalize_layerwise_reload(self.model, self.model_config)
            self._staged = self._watch = None
            raise

    def finish_weight_update(self) -> None:
        """End the reload and check what the model holds now.

        Raises DataError(``held_weights``) when that is not the version: a parameter without a value, or with another one.
        """
        if self._staged is None or self._watch is None:
            raise RuntimeError("finish_weight_update without weights: no update was received since start")
        manifest, watch = self._staged.manifest, self._watch
        finalize_layerwise_reload(self.model, self.model_config)
        self._repair_tied_head()
        try:
            # Quantised models have parameters that no checkpoint holds.
            held = watch.check(complete=self.model_config.quantization is None)
        finally:
            self._staged = self._watch = None
        logger.info("hpcrl: holds version %s: %d bytes, %d packed weights", manifest.version, held.nbytes, held.packed)
        if held.converted:
            logger.warning_once(
                "hpcrl: %d parameters are kept in a converted layout and are not compared after an update, first %s",
                len(held.converted),
                held.converted[0],
            )

    def _repair_tied_head(self) -> None:
        """Repack tied output heads.

        The reload handles a tied head as "no weights loaded" and puts its kernel tensors back; on CPUs these include
        the packed copy of the *old* weights, which would go on serving silently.
        """
        text_config = getattr(self.model_config, "hf_text_config", None)
        if getattr(text_config, "tie_word_embeddings", False):
            for module in self.model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        self._staged = self._watch = None
