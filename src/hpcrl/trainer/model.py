"""The policy: a Hugging Face causal language model, and the logprobs of given tokens under it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from hpcrl.errors import UserError
from hpcrl.trainer.batch import MicroBatch
from hpcrl.trainer.lora import merged_state

__all__ = ["Policy", "export_hf"]

_LOGIT_ELEMENTS = 1 << 26
"""Logits held at once (float32: 256 MiB). A larger set is computed piece by piece, and again in the backward pass."""
_PROBE_TOKENS = 8


class Policy:
    """``model`` is the unwrapped Hugging Face module (its parameter names are those that are published).

    Dropout is off throughout: the policy that is trained must be the one that was sampled.
    """

    def __init__(self, model: Any, temperature: float) -> None:
        self.model = model.eval()
        self.temperature = temperature
        self._check_head()

    @classmethod
    def load(cls, path: Path | str, dtype: str, device: torch.device, temperature: float) -> Policy:
        """Load the weights at ``path`` as ``dtype`` ("float32", "bfloat16", "float16"). Raises UserError."""
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(
                str(path), dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise UserError(
                f"cannot load a causal language model from {path}: {' '.join(str(error).split())}"
            ) from error
        return cls(model.to(device), temperature)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def logprobs(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprob after temperature of each trained token of the micro-batch, and the entropy there. Both float32 (n,).

        Logits are computed for trained tokens only. Entropy carries no gradient.
        """
        hidden = self.model.base_model(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
        ).last_hidden_state
        hidden = hidden.reshape(-1, hidden.shape[-1])[batch.source]
        rows = max(1, _LOGIT_ELEMENTS // self.model.get_output_embeddings().weight.shape[0])
        if len(hidden) <= rows:
            return self._head(hidden, batch.target)
        parts = [
            checkpoint(self._head, hidden_part, target_part, use_reentrant=False)
            for hidden_part, target_part in zip(hidden.split(rows), batch.target.split(rows), strict=True)
        ]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def _head(self, hidden: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.model.get_output_embeddings()(hidden).float() / self.temperature
        logprobs = torch.log_softmax(logits, dim=-1)
        with torch.no_grad():
            entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(-1, target[:, None])[:, 0], entropy

    @torch.no_grad()
    def _check_head(self) -> None:
        """Some models scale or cap logits after the output layer, which :meth:`_head` would miss: compare once, then trust."""
        ids = torch.arange(_PROBE_TOKENS, device=self.device)[None] % self.model.config.get_text_config().vocab_size
        whole = self.model(input_ids=ids, use_cache=False).logits.float()
        hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        split = self.model.get_output_embeddings()(hidden).float()
        if not torch.allclose(whole, split, rtol=1e-2, atol=1e-3):
            raise UserError(
                f"{type(self.model).__name__} changes logits after its output layer (scaling or capping); "
                "the trainer supports models whose logits are output_layer(hidden)"
            )


def export_hf(policy: Policy, source: Path, target: Path) -> None:
    """Write the weights as a Hugging Face model directory at ``target`` (beside, then renamed), with the tokenizer of ``source``.

    Adapters are merged into the weights. Raises UserError when ``target`` exists.
    """
    if target.exists():
        raise UserError(f"{target} exists; choose another directory for the exported model")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    policy.model.save_pretrained(str(temporary), state_dict=merged_state(policy.model))
    for file in sorted(Path(source).iterdir()):
        copied = file.suffix in {".json", ".jinja", ".model", ".txt", ".py"} and not (temporary / file.name).exists()
        if copied and not file.name.endswith(".index.json"):
            shutil.copy2(file, temporary / file.name)
    temporary.rename(target)
