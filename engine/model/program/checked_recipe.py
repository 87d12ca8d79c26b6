"""Decides whether the steps of a model run as one program, and not module by module."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from quire.engine.kv_cache.memory import KvMemory
from quire.engine.model.check import KvHeads, runs_alike
from quire.engine.model.collectives import Collectives
from quire.engine.model.program.compiled_step import CompiledStep
from quire.engine.model.program.layer_records import columns
from quire.engine.model.program.recipe import AttentionRecipe, NoRecipeError, StepRecipe
from quire.engine.model.program.recipe_reader import read_recipe
from quire.engine.model.step_tensors import Forward
from quire.kernels.cpu.products.stored_types import form_of_inputs

logger = logging.getLogger(__name__)


def recipe_of(module: PreTrainedModel) -> StepRecipe:
    """Return the recipe of a model; its layers with a state are modules if their weights need other inputs.

    Raises:
        NoRecipeError: some part of the model is not of a known shape.
    """
    recipe = read_recipe(module)
    return recipe if _has_one_form(recipe) else recipe.without_states()


def find_recipe(
    module: PreTrainedModel,
    heads: KvHeads,
    vocab_size: int,
    num_positions: int,
    collectives: Collectives | None = None,
) -> StepRecipe | None:
    """Return the recipe of a model on the CPU if its program gives the same bits as its modules.

    Otherwise log the reason and return None: the model then runs module by module.
    """
    try:
        recipe = recipe_of(module)
        _check_heads(recipe, heads)
        if recipe.has_modules and collectives is not None:
            raise NoRecipeError("parts of its layers are modules, which divide themselves among ranks")

        def other(memory: KvMemory) -> Forward:
            return CompiledStep(recipe, heads, memory, vocab_size, num_positions, collectives).run

        with _refusing_modules(recipe):
            is_alike = runs_alike(module, heads, vocab_size, num_positions, other)
        if not is_alike:
            raise NoRecipeError("as one program it would give other bits")
    except NoRecipeError as error:
        logger.info("%s runs module by module: %s", module.config.model_type, error)
        return None
    return recipe


@contextmanager
def _refusing_modules(recipe: StepRecipe) -> Iterator[None]:
    """Turn any exception of a recipe with modules into a NoRecipeError: they may need other arguments."""
    try:
        yield
    except (MemoryError, NoRecipeError):
        raise
    except Exception as error:
        if not recipe.has_modules:
            raise
        raise NoRecipeError(f"a module cannot be called alone: {type(error).__name__}: {error}") from error


def _check_heads(recipe: StepRecipe, heads: KvHeads) -> None:
    if not heads.are_alike:
        raise NoRecipeError("its keys and values, or its layers, differ in shape")
    if not _has_one_form(recipe):
        raise NoRecipeError("its linear layers have different dtypes or forms of inputs")
    for each in recipe.attentions:
        if each.latents is not None:
            _check_latents(recipe, each, heads)
        elif len(each.projections) not in (1, 3) or each.output.in_features % heads.head_dim:
            raise NoRecipeError(f"its heads of {heads.head_dim} values do not fill its projections")


def _has_one_form(recipe: StepRecipe) -> bool:
    """Return whether the linear layers have one dtype, and one form of inputs."""
    forms = {(each.packed.dtype, form_of_inputs(each.packed.stored)) for each in recipe.linears}
    return len(forms) == 1 and {recipe.dtype} == {dtype for dtype, _ in forms}


def _check_latents(recipe: StepRecipe, layer: AttentionRecipe, heads: KvHeads) -> None:
    sizes = [
        (each.latents.key_heads.num_heads, each.latents.key_heads.packed.in_features, columns(each, 0, heads))
        for each in (layer, recipe.attentions[0])
        if each.latents is not None
    ]
    if len(set(sizes)) != 1:
        raise NoRecipeError("its queries or latents differ in size")
    if layer.rotation is not None:
        cosines, _ = recipe.rotations[layer.rotation](torch.zeros(1, dtype=torch.long))
        if cosines.shape[1] != heads.head_dim - heads.latent_dim:
            raise NoRecipeError(f"its rotation has {cosines.shape[1]} values")
