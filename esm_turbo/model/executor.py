"""Forwards of an encoder: each is planned, and run eagerly, on packed tokens, or as a captured graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from esm_turbo.codecs.row_index import RowIndex, of_rows
from esm_turbo.config import Backend, TurboConfig
from esm_turbo.files.identity import (
    ModelIdentity,
    agree,
    model_identity,
    rounding,
    seen_as_before,
    seen_attention,
    seen_code,
    seen_foreign,
    seen_identity,
)
from esm_turbo.files.model_contents import dropping_module
from esm_turbo.kv.append import Append, NewTokens
from esm_turbo.kv_cache import PROTECTED_SLOTS, TurboKVCache
from esm_turbo.model.cache_engine import CacheEngine
from esm_turbo.model.checkpoints import record_outputs
from esm_turbo.model.family_encoder import FamilyEncoder
from esm_turbo.model.graphs import Caller, GraphPool
from esm_turbo.model.growth import Growth, StepKind, Store
from esm_turbo.model.inputs import (
    check_not_all_masked,
    check_positions,
    contexts_of_rows,
    count_tokens,
    count_tokens_with_past,
    in_order,
    split_attention_mask,
    token_mask,
)
from esm_turbo.model.packing import DTYPES as PACKED_DTYPES
from esm_turbo.model.packing import Packing, attention_of_rows, attention_to_cache
from esm_turbo.model.plain import (
    changed_attention,
    eagerly,
    holds_in_float32,
    is_plain,
    is_tokenwise,
    is_unhooked,
    plain_addresses,
    unmoved,
)
from esm_turbo.model.plan import ForwardInputs, ForwardPlan, PackedTokens, Rotary, Scope
from esm_turbo.model.pooled import PooledContexts
from esm_turbo.model.sessions import Extension, GrowingExtension, KVSession, Plain, PooledExtension, Prefill
from esm_turbo.model.static_cache import StaticKVCache
from esm_turbo.ops import triton_attention
from esm_turbo.ops.backends import resolve_backend

if TYPE_CHECKING:
    from transformers.modeling_outputs import ModelOutput

# Options of a forward that packed tokens support.
_PACKED_OPTIONS = {"return_dict", "use_cache", "output_hidden_states"}
# Options of a forward, and of a configuration, for which transformers records by hooks.
_RECORDED = ("output_hidden_states", "output_attentions")
_FEW_SPECIALS = NewTokens(specials=PROTECTED_SLOTS)


class Executor:
    """Plans and runs the forwards of an encoder.

    Attributes:
        captures: whether calls that recur are captured as CUDA graphs (model/graphs.py), which take device memory,
            and a fraction of a second to capture.
        graphs: those that have been captured.
    """

    def __init__(self, encoder: FamilyEncoder, kv: CacheEngine) -> None:
        self.encoder = encoder
        self.kv = kv
        self.captures = True
        self.graphs = GraphPool()
        self._code = ""
        self._agreed: dict[Hashable, bool] = {}

    # Planning.

    def plan(self, inputs: ForwardInputs, cache: TurboKVCache | None) -> ForwardPlan:
        """Plan a forward: without a cache, one that fills an empty cache, or one that extends its contexts.

        Raises:
            ValueError: the inputs contradict each other or the cache.
        """
        if cache is None:
            return self._plan_plain(inputs)
        return self._plan_extension(inputs, cache) if cache.batch_size else self._plan_prefill(inputs, cache)

    def _new_plan(self, inputs: ForwardInputs) -> ForwardPlan:
        encoder, options = self.encoder, dict(inputs.options)
        session, frozen_query = options.pop("kv_session", None), options.pop("frozen_query", None)
        return ForwardPlan(
            encoder.layer_kinds,
            encoder.frequencies,
            inputs.input_ids,
            chains=inputs.chains,
            session=session,
            frozen_query=frozen_query,
            options=options,
        )

    def _embed(
        self, input_ids: Tensor, mask: Tensor, counts: tuple[Tensor, Tensor] | None, chains: Tensor | None
    ) -> Tensor:
        return self.encoder.embed_sequences(self.encoder.embed(input_ids, mask, counts), chains)

    def _plan_plain(self, inputs: ForwardInputs) -> ForwardPlan:
        ids, embeddings = inputs.input_ids, inputs.inputs_embeds
        if (ids is None) == (embeddings is None):
            raise ValueError("exactly one of `input_ids` and `inputs_embeds` must be given")
        if inputs.token_counts is not None and ids is not None:
            embeddings = self._embed(ids, token_mask(ids, inputs.attention_mask), inputs.token_counts, inputs.chains)
        plan = self._new_plan(inputs)
        plan.options["use_cache"] = False
        plan.attention_mask, plan.positions, plan.embeddings = inputs.attention_mask, inputs.position_ids, embeddings
        self._pack_rows(plan, inputs.row_lengths)
        return plan

    def _plan_prefill(self, inputs: ForwardInputs, cache: TurboKVCache) -> ForwardPlan:
        ids, attention_mask, positions = inputs.ids, inputs.attention_mask, inputs.position_ids
        mask = token_mask(ids, attention_mask)
        if attention_mask is not None and self.encoder.token_dropout:
            # A cache is that of its tokens: the library counts masks of padding, too.
            ids = ids.masked_fill(~mask, self.encoder.config.pad_token_id)
            inputs = replace(inputs, input_ids=ids)
        keep, stored_positions = mask if inputs.append_mask is None else inputs.append_mask, positions
        if inputs.known.skips and positions is None:
            stored_positions = torch.arange(mask.shape[1], device=mask.device)
        plan = self._new_plan(inputs)
        plan.attention_mask, plan.positions, plan.cache = attention_mask, positions, cache
        plan.append = cache.plan_append(
            ids, keep, stored_positions, self.encoder.protected_ids, inputs.chains, inputs.known
        )
        plan.session = Prefill(cache, plan.append, self.kv.kv_backend)
        if inputs.token_counts is not None:
            plan.embeddings = self._embed(ids, mask, inputs.token_counts, inputs.chains)
        elif self.encoder.token_dropout:
            check_not_all_masked(count_tokens(ids, mask, self.encoder.mask_token_id))
        self._pack_rows(plan, inputs.row_lengths)
        return plan

    def _pack_rows(self, plan: ForwardPlan, row_lengths: Sequence[int] | None) -> None:
        """Pack the rows of a plan where the host knows their lengths and the packed encoder supports it."""
        if row_lengths is None:
            return
        rows, width = (plan.input_ids if plan.embeddings is None else plan.embeddings).shape[:2]  # type: ignore[union-attr]
        # Without a mask, padding is read.
        least = width if plan.attention_mask is None else 1
        if len(row_lengths) != rows or not all(least <= length <= width for length in row_lengths):
            raise ValueError(f"`row_lengths` must be {rows} numbers of {least} to {width}, got {list(row_lengths)}")
        scoped = any(kind.scope is not Scope.ROW for kind in plan.kinds)
        # Families of one scope leave positions and chains to masks that packed rows do not have.
        if (scoped or plan.positions is None) and self._can_pack(plan):
            plan.packing = Packing.of(row_lengths, width, self.encoder.device)

    def _plan_extension(self, inputs: ForwardInputs, cache: TurboKVCache) -> ForwardPlan:
        ids, attention_mask, positions = inputs.ids, inputs.attention_mask, inputs.position_ids
        batch_size, n = ids.shape
        index = inputs.context_index
        assert index is None or isinstance(index, RowIndex)
        past_mask, new_mask = split_attention_mask(cache, ids, attention_mask, index)
        counts = inputs.token_counts
        if counts is None and self.encoder.token_dropout:
            mask_id = self.encoder.mask_token_id
            counts = count_tokens_with_past(cache, past_mask, ids, new_mask, mask_id, index)
        plan = self._new_plan(inputs)
        if positions is None:
            positions = of_rows(cache.next_positions, index)[:, None] + torch.arange(n, device=ids.device)
            if positions.device.type == "cpu":
                check_positions(positions)
        chains, plan.chains = plan.chains, None
        if (limits := self.encoder.exact_contexts) is not None:
            # A new sequence follows those of the context.
            chains = of_rows(cache.next_chains, index)[:, None].expand(batch_size, n)
            if plan.frozen_query is not None and plan.frozen_query.keys:
                # Rows are a part of the query, which is the context's last sequence.
                chains = chains - 1
            if chains.device.type == "cpu":
                limits.check("context and new tokens", int(chains.max()) + 1, positions=0)
        embeddings = self._embed(ids, new_mask, counts, chains)
        if inputs.use_cache:
            keep = new_mask if inputs.append_mask is None else inputs.append_mask
            stored_positions = positions if inputs.known.skips else inputs.position_ids
            plan.cache = cache
            plan.append = cache.plan_append(
                ids, keep, stored_positions, self.encoder.protected_ids, chains, inputs.known
            )
        seen = None if attention_mask is None else new_mask
        visible = None if attention_mask is None or attention_mask.shape[1] == n else past_mask
        positions = positions.expand(batch_size, n)
        order = None
        if index is not None:
            ranks = cache.ranks if isinstance(cache, PooledContexts) else None
            index, order = index.grouped(ids.device, ranks)
        if order is not None:
            ids, embeddings, positions = (x[order] for x in (ids, embeddings, positions))
            past_mask, seen, visible = (None if x is None else x[order] for x in (past_mask, seen, visible))
        backend = self.kv.kv_backend
        if isinstance(cache, PooledContexts):
            assert index is not None
            plan.session = PooledExtension(cache, backend, past_mask, seen, visible, index)
        else:
            plan.session = Extension(cache, backend, past_mask, seen, plan.append, visible, index)
        plan.input_ids, plan.embeddings, plan.positions, plan.seen = ids, embeddings, positions, seen
        plan.order = order
        plan.visible, plan.reads_context = visible, True
        return plan

    # Running.

    def forward(self, inputs: ForwardInputs, cache: TurboKVCache | None) -> ModelOutput:
        """Run a forward, by a captured graph where there is one for it.

        Args:
            inputs: whose shapes and dtypes have been checked.
            cache: to be read, or filled if it is empty; None for a forward without one.

        Raises:
            ValueError: the inputs contradict each other or the cache, or the cache is another model's.
            RuntimeError: another thread changed the cache meanwhile.
        """
        if cache is not None:
            for name in ("output_attentions", "is_causal") if cache.batch_size else ():
                if inputs.options.get(name):
                    raise ValueError(f"`{name}` is not available for an extension, which attends in its own way")
            self.kv.claim(cache)
            assert cache.codec is not None
            self.kv.compile_ahead(cache.codec)
            inputs, lengths = _checked(inputs, cache), cache.lengths
            replayed = (
                self._extend_by_graph(inputs, cache) if cache.batch_size else self._prefill_by_graph(inputs, cache)
            )
            output = self.run(self.plan(inputs, cache)) if replayed is None else replayed
            if not inputs.use_cache:
                cache.check_unchanged(lengths)
            return output
        return self.run(self.plan(inputs, cache))

    def run(self, plan: ForwardPlan) -> ModelOutput:
        """Run a plan, on packed tokens where it can be, else by the library's forward."""
        if plan.session is not None:
            plan.session.runs_library = not self.runs_known_code()
            if plan.session.runs_library:
                self.check_attention()
            if not self._agrees():
                cause = seen_foreign(self.encoder) or "what was changed in the model"
                raise ValueError(
                    "contexts would give other numbers than the model itself does for a fixed input, because of"
                    f" {cause.rstrip(',')}: use the model without contexts, such as by the arm 'full'"
                )
        elif plan.packing is None and self.encoder.activates_by_session:
            plan.session = self._plain_session()
        packs = plan.packing is not None or (plan.reads_context and self._can_pack(plan))
        wanted = any(plan.options.get(name) or getattr(self.encoder.config, name, False) for name in _RECORDED)
        if wanted and not packs:
            record_outputs(self.encoder)
        output = self._run_packed(plan) if packs else self.encoder.library_forward(plan)
        if plan.append is not None:
            assert plan.cache is not None
            _check_finite(plan.cache, output[0], plan.append)
            plan.cache.commit(plan.append)
        return output if plan.order is None else in_order(output, plan.order.argsort())

    def _agrees(self) -> bool:
        """Tell whether contexts agree with the library's forward on a fixed input.

        They do not where a part of the model mixes tokens outside its attention, or sessions run other functions in
        place of changed ones. Looked at once for all code and options of a model, with its weights where it has other
        modules than its family's. Those and unknown code run as of `holds_in_float32`.
        """
        encoder, code = self.encoder, seen_code(self.encoder)
        # Every call comes here: only unusual models have their identities looked up.
        if (agreed := self._agreed.get(code)) is not None:
            return agreed
        identity = seen_identity(encoder)
        if (agreed := self._agreed.get(identity)) is not None:
            return agreed
        if (
            dropping_module(encoder.named_modules())
            or torch.compiler.is_compiling()
            or (encoder.device.type == "cuda" and torch.cuda.is_current_stream_capturing())
        ):
            return True
        known = self.runs_known_code() and is_tokenwise(encoder)
        with seen_as_before(encoder):
            if known:
                with eagerly(), unmoved(encoder):
                    agrees = self._agrees_on_probe(strict=False)
            else:
                agrees = holds_in_float32(encoder, lambda one: one.executor._agrees_on_probe(strict=True))
        self._agreed[code if known else identity] = agrees
        return agrees

    def forget_unknown_code(self) -> None:
        """Have contexts of unknown code, which may be another one in each call, compared again."""
        for seen in list(self._agreed):
            if isinstance(seen, ModelIdentity) and seen.foreign:
                self._agreed.pop(seen, None)

    def _agrees_on_probe(self, *, strict: bool) -> bool:
        """See `_agrees`, of which this keeps nothing; where modules may mix tokens, it is to be strict."""
        ids, mask, chains = self.probe_input()
        of_first, of_real = (None, None) if chains is None else (chains[:1], chains.where(mask.bool(), -1))
        # Without padding, there is no mask.
        row, rows = ForwardInputs(ids[:1], chains=of_first), ForwardInputs(ids, mask, chains=of_real)
        alone, together = self._plain_states(row), self._plain_states(rows)
        return (
            self._alike(alone, together[:1], strict)
            and self._extends_as(row, alone, strict)
            and self._extends_as(rows, together, strict)
        )

    def _alike(self, outputs: Tensor, other: Tensor, strict: bool) -> bool:
        precision = model_identity(self.encoder, sampled=False).precision
        return agree(outputs, other, precision, bound=1e-4 if strict else 1e-3)

    def _extends_as(self, inputs: ForwardInputs, expected: Tensor, strict: bool) -> bool:
        """See `_agrees`: the second half of the tokens runs again after the first, which has seen it.

        So does the first after the second if it is to be strict: only one of them has what is largest.
        """
        ids, mask, chains = inputs.ids, inputs.attention_mask, inputs.chains
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        columns = torch.arange(ids.shape[1], device=ids.device)[None]
        first, second = slice(ids.shape[1] // 2), slice(ids.shape[1] // 2, None)
        # Kernels would have to be compiled, and are tested against this.
        backend = resolve_backend(Backend.TORCH, self.encoder.device)

        def forward(inputs: ForwardInputs, cache: TurboKVCache) -> Tensor | None:
            try:
                plan = self.plan(_checked(inputs, cache), cache)
            except ValueError:
                # As others of its kind will be, and tell why.
                return None
            assert isinstance(plan.session, Prefill | Extension)
            plan.session.backend, plan.session.runs_library = backend, not self.runs_known_code()
            output: Tensor = self.encoder.library_forward(plan)[0]
            if plan.append is not None:
                cache.commit(plan.append)
            return output

        def as_expected(found: Tensor | None, where: slice) -> bool:
            which = real[:, where]
            return found is None or self._alike(expected[:, where][which], found[which], strict)

        def extends(past: slice, new: slice) -> bool:
            cache = self.kv.cache_within_call(TurboConfig.from_preset("exact"))
            self.kv.claim(cache)
            kept = torch.zeros_like(real)
            kept[:, past] = real[:, past]
            prefilled = forward(replace(inputs, use_cache=True, append_mask=kept), cache)
            seen = None if mask is None else torch.cat((mask[:, past], mask[:, new]), dim=1)
            extended = forward(ForwardInputs(ids[:, new], seen, columns[:, new]), cache)
            return as_expected(prefilled, slice(None)) and as_expected(extended, new)

        if not extends(first, second):
            return False
        if not strict:
            return True
        if chains is None:
            return extends(second, first)
        # Sequences of E1 do not see those that follow them.
        return as_expected(self._plain_states(ForwardInputs(ids[:, first], chains=chains[:, first])), first)

    def _plain_session(self) -> Plain | None:
        """The session of a forward without a cache; None where the library's functions are to run."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        model_identity(self.encoder, sampled=False)
        return Plain() if self.runs_known_code() and self._agrees() else None

    def observe(self, inputs: ForwardInputs, session: KVSession) -> None:
        """Run the library's forward for a session that only collects; ids and embeddings may both be given."""
        plan = self._new_plan(inputs)
        plan.attention_mask, plan.positions = inputs.attention_mask, inputs.position_ids
        plan.embeddings, plan.session = inputs.inputs_embeds, session
        self.encoder.library_forward(plan)

    def probe_input(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rows of 12 and of 8 tokens that stand for all input: ids, which of them are real, and chains, int64 [2, 12].

        Rows of E1 are of two sequences, the first of 6 tokens; None for other families.
        """
        (begin, end), masked = self.encoder.special_ids, self.encoder.mask_token_id
        others = set(range(self.encoder.config.vocab_size)) - {begin, end, masked, self.encoder.config.pad_token_id}
        row = torch.tensor([begin, *sorted(others)[::3][:9], masked, end], device=self.encoder.device)
        ids, mask = torch.stack((row, row.flip(0))), torch.ones(2, len(row), dtype=torch.int64, device=row.device)
        mask[1, 8:] = 0
        return ids, mask, None if self.encoder.exact_contexts is None else mask.cumsum(dim=1) // 7

    def probe_states(self) -> Tensor:
        """Last hidden states of the library's forward for the real tokens of `probe_input`, [20, hidden_size]."""
        ids, mask, chains = self.probe_input()
        with eagerly():
            return self._plain_states(ForwardInputs(ids, mask, chains=chains))[mask.bool()]

    def _plain_states(self, inputs: ForwardInputs) -> Tensor:
        """Last hidden states of the library's forward, [batch, n, hidden_size]."""
        states: Tensor = self.encoder.library_forward(self._plan_plain(inputs))[0]
        return states

    def sampled_outputs(self) -> Tensor:
        """Some elements of `probe_states`, float32 [64]."""
        elements = self.probe_states().flatten()
        return elements[torch.arange(64, device=elements.device) * (len(elements) - 1) // 63].float()

    def check_attention(self) -> None:
        """Check that the model attends as the library's does, since sessions attend in place of it.

        Raises:
            ValueError: its attention was changed.
        """
        model_identity(self.encoder, sampled=False)
        if change := seen_attention(self.encoder):
            raise changed_attention(f"{change} changes the attention of the model")

    def _run_packed(self, plan: ForwardPlan) -> ModelOutput:
        from esm_turbo.ops import triton_encoder

        embeddings, packing = plan.embeddings, plan.packing
        unpack: Callable[[Tensor], Tensor]
        if packing is not None:
            self.kv.compile_ahead()
            if embeddings is None:
                assert plan.input_ids is not None
                mask = token_mask(plan.input_ids, plan.attention_mask)
                embeddings = self._embed(plan.input_ids, mask, None, plan.chains)
            embeddings, unpack = packing.pack(embeddings), packing.unpack
            attend = attention_of_rows(packing, triton_encoder, plan)
        else:
            assert embeddings is not None
            shape = embeddings.shape[:2]
            embeddings = embeddings.flatten(0, 1)
            attend = attention_to_cache(plan, shape[0])

            def unpack(x: Tensor) -> Tensor:
                batch: Tensor = x.unflatten(0, shape)
                return batch

        wants_states = bool(plan.options.get("output_hidden_states"))
        wanted = range(self.encoder.config.num_hidden_layers) if wants_states else ()

        def positions(scope: Scope) -> Tensor:
            if packing is None:
                return plan.positions_at(scope).flatten()
            if plan.positions is None and plan.chains is None:
                return packing.positions
            places = plan.positions_at(scope)
            return packing.pack(places.expand(packing.batch_size, -1))

        rotary = Rotary(plan.kinds, plan.frequencies, positions)
        tokens = PackedTokens(embeddings, rotary, attend, wanted)
        last, states = self.encoder.run_packed(tokens, triton_encoder)
        last = unpack(last)
        return self.encoder.output(last, (*map(unpack, states.values()), last) if wants_states else None)

    def _can_pack(self, plan: ForwardPlan) -> bool:
        """Tell whether packed tokens give what the library's forward of a plan would."""
        encoder = self.encoder
        if plan.cache is None and encoder.packs and encoder.device.type == "cuda":
            # Of a forward with a cache, that was checked already.
            model_identity(encoder, sampled=False)
        return (
            encoder.packs
            and plan.frozen_query is None
            and encoder.device.type == "cuda"
            and encoder.dtype in PACKED_DTYPES
            and not (torch.is_grad_enabled() or encoder.training or torch.is_autocast_enabled("cuda"))
            and not torch.compiler.is_compiling()
            and not {name for name, value in plan.options.items() if value is not None} - _PACKED_OPTIONS
            and encoder.config._attn_implementation in ("sdpa", "flash_attention_2")
            and self.kv.kv_backend.name is Backend.TRITON
            and self.runs_known_code()
            and all(is_plain(module, encoder.plain_modules) for module in encoder.parts)
        )

    # Captured graphs.

    @property
    def replays(self) -> bool:
        """True if calls that recur are replayed as CUDA graphs, unless something of the call itself forbids it."""
        return (
            self.captures
            and self.encoder.capturable
            and not self.encoder.is_spread
            and self.encoder.device.type == "cuda"
            and not self.encoder.training
            and self.kv.kv_backend.name is Backend.TRITON
        )

    def runs_known_code(self) -> bool:
        """Tell whether the functions of the forward are known, and those that it had when it was first seen.

        Fused kernels and captured graphs replace them. The model is seen by `model_identity`.
        """
        code, _ = seen_code(self.encoder)
        self._code = self._code or code
        return bool(code) and code == self._code

    def addresses(self) -> tuple[int, ...] | None:
        """Addresses of all weights if a forward may be captured as a graph now, see `GraphPool`; else None.

        The last numbers stand for the options of modules and for what rounds products, which graphs contain.
        """
        if (
            not self.replays
            or torch.is_grad_enabled()
            or torch.is_autocast_enabled("cuda")
            or torch.compiler.is_compiling()
            or torch.cuda.is_current_stream_capturing()
        ):
            return None
        if not self.runs_known_code():
            return None
        addresses = self.plain_addresses()
        if addresses is None:
            return None
        return (*addresses, seen_code(self.encoder)[1], hash(rounding(self.encoder)))

    def plain_addresses(self) -> tuple[int, ...] | None:
        """Addresses of all weights if every module is the library's or this package's own; else None."""
        encoder = self.encoder
        parts = [plain_addresses(module, encoder.plain_modules) for module in encoder.parts]
        return None if None in parts else tuple(chain.from_iterable(parts))  # type: ignore[arg-type]

    def _extend_by_graph(self, inputs: ForwardInputs, cache: TurboKVCache) -> ModelOutput | None:
        """An extension by a captured graph; None where it has to run eagerly."""
        # A static cache is read where it lies, within a graph.
        if not inputs.is_plain or inputs.use_cache or inputs.token_counts is not None or not _fits_graphs(cache):
            return None
        if isinstance(cache, StaticKVCache):
            return None
        index = inputs.context_index
        # Only kernels read an index that changes between replays, and slots are too many to be copied.
        assert cache.codec is not None and (index is None or isinstance(index, RowIndex))
        if index is not None and (isinstance(cache, PooledContexts) or not triton_attention.can_run(cache.codec)):
            return None
        if (addresses := self.addresses()) is None:
            return None
        if inputs.position_ids is None:
            steps = torch.arange(inputs.ids.shape[1], device=inputs.ids.device)
            inputs = replace(inputs, position_ids=of_rows(cache.next_positions, index)[:, None] + steps)
        states = self.graphs.extend(Caller(self, addresses), cache, inputs)
        return None if states is None else self.encoder.output(states, None)

    def _prefill_by_graph(self, inputs: ForwardInputs, cache: TurboKVCache) -> ModelOutput | None:
        """A prefill of one whole row by a captured graph; None where it has to run eagerly."""
        ids, lengths = inputs.ids, inputs.row_lengths
        if lengths is None or list(lengths) != [ids.shape[1]] or cache.columns:
            return None
        if inputs.position_ids is not None or inputs.append_mask is not None or not inputs.is_plain:
            return None
        if inputs.chains is not None:
            return None
        if (inputs.known.specials or 0) > PROTECTED_SLOTS:
            return None
        if not self.encoder.packs or self.encoder.dtype not in PACKED_DTYPES:
            return None
        if (addresses := self.addresses()) is None:
            return None
        if inputs.token_counts is None:
            mask = token_mask(ids, inputs.attention_mask)
            inputs = replace(inputs, token_counts=count_tokens(ids, mask, self.encoder.mask_token_id))
        replayed = self.graphs.prefill(Caller(self, addresses), cache, inputs)
        if replayed is None:
            return None
        states, filled = replayed
        _check_finite(cache, states)
        cache.take_over(filled)
        return self.encoder.output(states, None)

    def fill(self, cache: TurboKVCache, inputs: ForwardInputs, packing: Packing) -> ModelOutput:
        """Fill an empty cache of this model with packed rows, of two special tokens at most.

        Nothing is checked, and nothing waits for the device.
        """
        mask = token_mask(inputs.ids, inputs.attention_mask)
        plan = self._new_plan(inputs)
        plan.cache, plan.packing = cache, packing
        plan.append = cache.plan_append(inputs.ids, mask, None, self.encoder.protected_ids, known=_FEW_SPECIALS)
        plan.session = Prefill(cache, plan.append, self.kv.kv_backend)
        plan.embeddings = self._embed(inputs.ids, mask, inputs.token_counts, None)
        return self.run(plan)

    def run_tail(self, cache: TurboKVCache, kind: StepKind, store: Store, counts: tuple[Tensor, Tensor]) -> Tensor:
        """Run the last tokens of rows that grow, and a mask after them; nothing is checked, or waits for the device.

        Args:
            cache: of this model, with a column for every token and for the mask. Its `token_ids`, and `positions` if it
                has them, are known beyond its `lengths`.
            kind: numbers of tokens that run, from each row's length on, and of those that are stored.
            store: stores them.
            counts: number of tokens and of masks that each row has in the end, int64 [batch] each.

        Returns:
            The mask's last hidden states, [batch, hidden_size].
        """
        columns = cache.lengths[:, None] + torch.arange(kind.tokens, device=cache.device)
        input_ids = cache.token_ids.gather(1, columns).long()
        input_ids[:, -1].fill_(self.encoder.mask_token_id)
        plan = self._new_plan(ForwardInputs(input_ids, options={"return_dict": True}))
        plan.reads_context = True
        plan.positions = columns if cache.positions is None else cache.positions.gather(1, columns).long()
        plan.session = GrowingExtension(cache, self.kv.kv_backend, kind.stored, store)
        plan.embeddings = self._embed(input_ids, torch.ones_like(input_ids, dtype=torch.bool), counts, None)
        states: Tensor = self.run(plan).last_hidden_state
        last: Tensor = states[:, -1]
        return last

    @contextmanager
    def growing(
        self, cache: TurboKVCache, kinds: Sequence[StepKind], columns: int, uses: int
    ) -> Iterator[Growth | None]:
        """See `CachedModel.growing`."""
        fits = is_unhooked(self.encoder) and cache.chains is None and _fits_graphs(cache)
        addresses = self.addresses() if fits else None
        if addresses is None:
            yield None
            return
        self.kv.claim(cache)
        assert cache.codec is not None
        self.kv.compile_ahead(cache.codec)
        with self.graphs.growing(Caller(self, addresses, uses), cache, kinds, columns) as growth:
            yield growth

    def decoded(self, cache: TurboKVCache) -> TurboKVCache:
        """See `CachedModel.decoded`."""
        if isinstance(cache, PooledContexts):
            raise ValueError("contexts in a pool are read as they are stored: only a cache of its own can be decoded")
        self.kv.claim(cache)
        if not cache.batch_size:
            raise ValueError("the cache is empty: prefill a context first")
        if cache.config.codec == "exact":
            return cache
        single = cache.batch_size == 1 and cache.chains is None and _fits_graphs(cache)
        if single and (addresses := self.addresses()) is not None:
            made = self.graphs.decode(Caller(self, addresses), cache)
            if made is not None:
                return made
        return self.kv.decode(cache)


def _check_finite(cache: TurboKVCache, states: Tensor, append: Append | None = None) -> None:
    """Check new tokens if the codec would store what is not finite as if it were.

    Those that are appended on a device, which is not waited for, show in the outputs of the forward that appends them.

    Args:
        cache: that will hold them.
        states: last hidden states, [batch, n, hidden_size], which are not finite where keys or values were not.
        append: the tokens; None for all.

    Raises:
        ValueError: one is not finite.
    """
    assert cache.codec is not None
    hides = cache.codec.hides_appended_nan if cache.columns else cache.codec.hides_nan
    on_cuda = states.device.type == "cuda"
    if not hides or (on_cuda and (cache.columns or torch.cuda.is_current_stream_capturing())):
        return
    finite = states.isfinite().all(2)
    if append is not None:
        order, counts = append.order.to(finite.device), append.counts.to(finite.device)
        finite = finite.gather(1, order) | (torch.arange(finite.shape[1], device=finite.device) >= counts[:, None])
    if not bool(finite.all()):
        raise ValueError(
            f"the model's hidden states are not finite, and {cache.config.name!r} would hide it: try another dtype"
        )


def _fits_graphs(cache: TurboKVCache) -> bool:
    assert cache.codec is not None
    return cache.codec.rows_alike and cache.protected_columns.shape[1] <= PROTECTED_SLOTS


def _checked(inputs: ForwardInputs, cache: TurboKVCache) -> ForwardInputs:
    """The inputs of a forward with a cache, with the contexts of rows looked up.

    Raises:
        ValueError: they contradict the cache.
    """
    ids = inputs.ids
    if not cache.batch_size:
        return inputs
    index = contexts_of_rows(cache, inputs.context_index, len(ids))
    if inputs.use_cache and inputs.context_index is not None:
        raise ValueError("nothing can be appended to contexts that rows name: leave out `context_index`")
    if inputs.use_cache and cache.batch_size != len(ids):
        raise ValueError(
            f"cannot append {len(ids)} rows to a cache of one: repeat it first, cache.batch_repeat_interleave"
        )
    return replace(inputs, context_index=index)
