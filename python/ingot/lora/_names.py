"""The names of modules: in files of models, in adapters of kohya, and in diffusers.

kohya joins the parts of a name by ``_``. Where a model is known by several names, as the U-Net of Stable
Diffusion, an adapter may use either.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

# The blocks of the U-Net of Stable Diffusion 1, 2 and XL: the original name, and diffusers'.
_UNET = tuple(
    (re.compile(f"{original}(?=$|[._])"), diffusers)
    for original, diffusers in (
        (r"time_embed\.0", "time_embedding.linear_1"),
        (r"time_embed\.2", "time_embedding.linear_2"),
        (r"label_emb\.0\.0", "add_embedding.linear_1"),
        (r"label_emb\.0\.2", "add_embedding.linear_2"),
        (r"input_blocks\.0\.0", "conv_in"),
        (r"out\.0", "conv_norm_out"),
        (r"out\.2", "conv_out"),
        (r"middle_block\.0", "mid_block.resnets.0"),
        (r"middle_block\.1", "mid_block.attentions.0"),
        (r"middle_block\.2", "mid_block.resnets.1"),
        *(
            entry
            for block in range(4)
            for entry in (
                *(
                    (rf"input_blocks\.{3 * block + layer + 1}\.0", f"down_blocks.{block}.resnets.{layer}")
                    for layer in range(2)
                ),
                *(
                    (rf"input_blocks\.{3 * block + layer + 1}\.1", f"down_blocks.{block}.attentions.{layer}")
                    for layer in range(2)
                ),
                (rf"input_blocks\.{3 * block + 3}\.0\.op", f"down_blocks.{block}.downsamplers.0.conv"),
                *(
                    (rf"output_blocks\.{3 * block + layer}\.0", f"up_blocks.{block}.resnets.{layer}")
                    for layer in range(3)
                ),
                (rf"output_blocks\.{3 * block + 2}\.[12]\.conv", f"up_blocks.{block}.upsamplers.0.conv"),
                *(
                    (rf"output_blocks\.{3 * block + layer}\.1", f"up_blocks.{block}.attentions.{layer}")
                    for layer in range(3)
                ),
            )
        ),
    )
)
_RESNET = (
    ("in_layers.0", "norm1"),
    ("in_layers.2", "conv1"),
    ("emb_layers.1", "time_emb_proj"),
    ("out_layers.0", "norm2"),
    ("out_layers.3", "conv2"),
    ("skip_connection", "conv_shortcut"),
)
# Parts of names that contain the sign by which kohya joins parts.
_WORDS = (
    "add_embedding add_k_proj add_q_proj add_v_proj attentions attn attn1 attn2 context_embedder conv "
    "conv1 conv2 conv_in conv_norm_out conv_out conv_shortcut down_blocks downsamplers emb_layers "
    "embeddings encoder encoder_hidden_states_proj fc1 fc2 ff ff_context final_layer_norm "
    "guidance_embedder in_layers input_blocks k_proj label_emb layer_norm1 layer_norm2 layers linear "
    "linear_1 linear_2 mid_block middle_block mlp net norm norm1 norm1_context norm2 norm_added_k "
    "norm_added_q norm_out op out out_layers out_proj output_blocks patch_embedding pos_embed "
    "position_embedding proj proj_in proj_mlp proj_out q_proj resnets self_attn single_transformer_blocks "
    "skip_connection text_embedder text_model text_projection time_emb_proj time_embed time_embedding "
    "time_text_embed timestep_embedder to_add_out to_k to_out to_q to_v token_embedding "
    "transformer_blocks up_blocks upsamplers v_proj x_embedder "
)
_WORD = re.compile(f"({'|'.join(sorted(_WORDS.split(), key=len, reverse=True))}|[0-9]+)(?=_|$)")


def of_unet(path: str) -> str:
    """Return diffusers' name of a module of a U-Net of Stable Diffusion, or `path` if it has no other."""
    for original, diffusers in _UNET:
        found = original.match(path)
        if found:
            rest = path[found.end() :]
            if ".resnets." in diffusers:
                rest = next(
                    (
                        f".{new}{rest[len(old) + 1 :]}"
                        for old, new in _RESNET
                        if f"{rest}.".startswith(f".{old}.")
                    ),
                    rest,
                )
            return f"{diffusers}{rest}"
    return path


def dotted(flat: str) -> str | None:
    """Return a name of kohya with ``.`` between its parts, or None if it has unknown parts."""
    parts, at = [], 0
    while at < len(flat):
        word = _WORD.match(flat, at)
        if word is None:
            return None
        parts.append(word[0])
        at = word.end() + 1
    return ".".join(parts)


def forms(path: str) -> Iterator[str]:
    """Yield the names by which an adapter may call a module of a base.

    Adapters are trained on a part of the model in the file, so the first parts of the path may be missing.
    """
    rest = path
    for _ in range(5):
        yield rest
        yield of_unet(rest)
        _, dot, rest = rest.partition(".")
        if not dot:
            return


# Parts that a model has around the model that was adapted, or the other way round.
_WRAPPERS = ("model.", "transformer.", "language_model.", "diffusion_model.")


class Modules:
    """The modules of a base, found by the names of adapters."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = dict.fromkeys(paths)
        self._parts: dict[str, dict[str, None]] = {}
        self._flat: dict[str, dict[str, None]] = {}
        for path in self._paths:
            for form in forms(path):
                self._parts.setdefault(form, {})[path] = None
                self._flat.setdefault(form.replace(".", "_"), {})[path] = None

    def find(self, path: str, is_flat: bool) -> list[str]:
        """Return the modules of this name: one, or more if the name is ambiguous."""
        if path in self._paths:
            return [path]
        if is_flat:
            return [*self._flat.get(path, ())]
        for wrapper in ("", *_WRAPPERS):
            found = self._parts.get(path.removeprefix(wrapper)) if path.startswith(wrapper) else None
            if found:
                return [*found]
        return []
