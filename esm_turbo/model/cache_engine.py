"""The caches of an encoder: how they are stored, and which are its own."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch

from esm_turbo.calibration import Calibration
from esm_turbo.codecs import KVCodec, PackedContext, codec_class, codec_without_calibration
from esm_turbo.config import DEFAULT_PRESET, Backend, Geometry, TurboConfig
from esm_turbo.files.fingerprint import same_codec
from esm_turbo.files.identity import ModelIdentity, model_identity, probed_identity, seen_identity, watch
from esm_turbo.kv.tensors import OWN_TENSORS
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.model.family_encoder import FamilyEncoder
from esm_turbo.model.pooled import PooledContexts
from esm_turbo.model.spread import layer_devices
from esm_turbo.ops import decoded_attention
from esm_turbo.ops.backends import KVBackend, resolve_backend
from esm_turbo.ops.copies import Gatherer
from esm_turbo.ops.warmup import Sizes

# The caches of one encoder are stored under these options, for the thread or task that says so.
_CHOSEN = ContextVar[tuple["CacheEngine", TurboConfig] | None]("chosen", default=None)
# The model of this engine is looked at after the call, for the thread or task that says so.
_WATCHED = ContextVar["CacheEngine | None"]("watched", default=None)

# Calls that run, by the engine of their model: copies of a model have none.
_CALLS = Counter["CacheEngine"]()
_COUNTING = threading.Lock()


class CacheEngine:
    """The options of an encoder's caches, their codec, and the checks that a cache belongs to the encoder.

    Attributes:
        calibration: from which codecs are made; None for none.
        preset_chosen: whether `configure` was given a preset; then it is used or refused, never left aside.
        backend: implementation of encoding and packed attention, see `Backend`.
        model_id: see `CachedModel.model_id`.
    """

    def __init__(self, encoder: FamilyEncoder) -> None:
        self.encoder = encoder
        self.calibration: Calibration | None = None
        # The model for which the calibration has been checked.
        self._calibrated: ModelIdentity | None = None
        self._config = TurboConfig.from_preset(DEFAULT_PRESET)
        self.preset_chosen = False
        self.backend: str | Backend = Backend.AUTO
        self.model_id: str | None = None

    @property
    def config(self) -> TurboConfig:
        """Options of new caches."""
        chosen = _CHOSEN.get()
        return chosen[1] if chosen is not None and chosen[0] is self else self._config

    @config.setter
    def config(self, config: TurboConfig) -> None:
        self._check_in_no_call()
        self._config = config

    @contextlib.contextmanager
    def storing_as(self, config: TurboConfig) -> Iterator[None]:
        """Within the block, new caches have these options; other threads see nothing of it."""
        token = _CHOSEN.set((self, config))
        try:
            yield
        finally:
            _CHOSEN.reset(token)

    @contextlib.contextmanager
    def in_call(self) -> Iterator[None]:
        """Within the block, whose results are of one preset and one calibration, neither can be changed."""
        self.encoder.executor.forget_unknown_code()
        with _COUNTING:
            _CALLS[self] += 1
        try:
            yield
        finally:
            with _COUNTING:
                _CALLS[self] -= 1
                if not _CALLS[self]:
                    del _CALLS[self]

    def _check_in_no_call(self) -> None:
        if _CALLS[self]:
            raise RuntimeError(
                "a call with this model has not ended, and its results are of one preset and one calibration: change"
                " them afterwards, or those of a copy of the model"
            )

    def configure(
        self,
        calibration: str | os.PathLike[str] | Calibration | None,
        preset: str | TurboConfig | None,
        backend: str | Backend,
    ) -> None:
        """See `CachedModel.set_turbo`."""
        self._check_in_no_call()
        config = TurboConfig.from_preset(DEFAULT_PRESET if preset is None else preset)
        codec_class(config)
        resolve_backend(backend, self.encoder.device)
        if isinstance(calibration, str | os.PathLike):
            calibration = Calibration.load(calibration)
        if calibration is not None:
            if not isinstance(calibration, Calibration):
                raise ValueError(f"`calibration` must be a Calibration or its path, got {calibration!r}")
            calibration.check_model(self.encoder)
            calibration.warn_if_inaccurate(config)
            self._calibrated = model_identity(self.encoder)
        self.calibration, self.config, self.backend = calibration, config, backend
        self.preset_chosen = preset is not None

    @property
    def kv_backend(self) -> KVBackend:
        """The backend that `backend` names on the model's device.

        Raises:
            ValueError: it cannot run there.
        """
        return resolve_backend(self.backend, self.encoder.device)

    def codec(self, config: TurboConfig) -> KVCodec:
        """The codec for these options.

        Raises:
            ValueError: the options need a calibration and the model has none, or another model's.
        """
        return self._codec(config, model_identity(self.encoder))

    def _codec(self, config: TurboConfig, identity: ModelIdentity) -> KVCodec:
        """See `codec`; the identity is the model's."""
        if self.calibration is not None:
            if self._calibrated is not identity:
                self.calibration.check_model(self.encoder)
                self._calibrated = identity
            return self.calibration.codec(config)
        codec = codec_without_calibration(config, Geometry.of(self.encoder.config))
        if codec is not None:
            return codec
        raise ValueError(
            f"preset {config.name!r} needs a calibration of this model: make one with `esm-turbo calibrate"
            " PROTEINS.fasta --model MODEL --out calibration.safetensors` and pass calibration=, or pass"
            " calibration='auto' (--calibration auto); preset 'exact' and the arms 'frozen' and 'full' need none"
        )

    def warmup(self) -> int:
        """Compile the GPU kernels that this model needs for caches of its preset, side by side; once on a machine.

        They are compiled at the latest when a call first needs them. They are few, whatever the lengths and the numbers
        of sequences, and other ones for each dtype and preset.

        Returns:
            Number of kernels; 0 where there are none, as on a CPU.

        Raises:
            ValueError: the preset needs a calibration and the model has none.
            KernelError: (a RuntimeError) a kernel does not compile.
            KernelCacheError: (an OSError) the folder of compiled kernels cannot be used.
        """
        return self.compile_ahead(self.codec(self.config))

    def compile_ahead(self, *codecs: KVCodec) -> int:
        """Compile the kernels of calls with caches of these codecs, or of forwards without caches; their number."""
        if torch.compiler.is_compiling():
            return 0
        geometry = Geometry.of(self.encoder.config)
        sizes = Sizes(geometry.num_heads, geometry.head_dim, self.encoder.packed_operations)
        return self.kv_backend.compile_ahead(sizes, codecs, self.encoder.dtype, self.encoder.device)

    def new_cache(self) -> TurboKVCache:
        """An empty cache of this model.

        Raises:
            ValueError: the preset needs a calibration and the model has none, the model is in training mode, or it runs
                unknown code, see `ModelIdentity.check_lasting`.
        """
        identity = model_identity(self.encoder)
        identity.check_lasting()
        return self._cache(self.config, identity)

    def cache_within_call(self, config: TurboConfig) -> TurboKVCache:
        """An empty cache that is not returned to users: any model can read what it has just written.

        Args:
            config: options under which contexts are stored.
        """
        return self._cache(config, model_identity(self.encoder))

    def _cache(self, config: TurboConfig, identity: ModelIdentity) -> TurboKVCache:
        codec = self._codec(config, identity)
        return TurboKVCache(config, Geometry.of(self.encoder.config), identity, codec, self.encoder.device)

    def refresh_fingerprint(self) -> bool:
        """Notice changes of the weights that a forward on a device does not, see `model_identity`.

        Waits for the device. Caches that were written with other weights are refused afterwards.

        Returns:
            Whether there were any since the last forward.
        """
        return watch(self.encoder, self._gather)()

    @property
    def _gather(self) -> type[Gatherer] | None:
        """How a sample of the weights is read."""
        return Gatherer if self.encoder.device.type == "cuda" and self.kv_backend.name is Backend.TRITON else None

    @contextlib.contextmanager
    def watched(self) -> Iterator[Callable[[], bool]]:
        """Within the block, forwards with caches that were this model's when it was last seen do not look at it again.

        Gives what tells afterwards, while a device still computes, whether the model has changed since; what the block
        computed is then to be dropped. Nothing within it may change a cache.
        """
        changed = watch(self.encoder, self._gather)
        token = _WATCHED.set(self)
        try:
            yield changed
        finally:
            _WATCHED.reset(token)

    def bind_cache(self, cache: TurboKVCache) -> None:
        """Check that a cache is this model's, and set the codec that reads it. Waits for the device.

        Raises:
            ValueError: the cache is another model's, or this model has no calibration or another one.
        """
        if cache.codec is not None:
            self.refresh_fingerprint()
        self.claim(cache)

    def claim(self, cache: TurboKVCache) -> None:
        """See `bind_cache`; does not wait for the device."""
        if isinstance(cache, PooledContexts):
            for slab in cache.slabs_read:
                self.claim(slab)
        if _WATCHED.get() is self and self._is_own(cache, seen_identity(self.encoder)):
            self._place(cache)
            return
        # What no model has claimed may come from a file.
        identity = probed_identity(self.encoder) if cache.codec is None else model_identity(self.encoder)
        if self._is_own(cache, identity):
            self._place(cache)
            return
        geometry = Geometry.of(self.encoder.config)
        if difference := cache.geometry.unlike(geometry):
            raise ValueError(f"the cache is {difference}")
        if difference := cache.identity.difference(identity):
            raise ValueError(f"the cache belongs to another model: {difference}")
        codec = self._codec(cache.config, identity)
        if not same_codec(cache.codec_fingerprint, codec.fingerprint):
            raise ValueError("the cache was written with another calibration: this one cannot read its codes")
        cache.check_layout(codec)
        # The same object, so that the next check is one of identity.
        cache.codec, cache.identity = codec, identity
        self._place(cache)

    def _is_own(self, cache: TurboKVCache, identity: ModelIdentity | None) -> bool:
        """Whether a cache has been claimed by a model of this identity, with the codec that it has now."""
        return (
            identity is not None
            and cache.identity is identity
            and cache.codec is not None
            and cache.codec is self._codec(cache.config, identity)
        )

    def decode(self, cache: TurboKVCache) -> TurboKVCache:
        """See `CachedModel.decoded`; nothing is checked, and nothing waits for a device."""
        codec = cache.codec
        assert codec is not None
        # Copies: an append to the cache may write into its own.
        own = {name: tensor.clone() for name, tensor in cache.named_tensors() if name in OWN_TENSORS}
        tensors = {**own, "protected_columns": cache.protected_columns[:, :0]}
        for index, layer in enumerate(cache.layers):
            context = PackedContext(
                layer.packed,
                None,
                layer.protected,
                None,
                layer.rows,
                # A model may be spread over several devices.
                protected_columns=cache.protected_columns.to(next(iter(layer.packed.values())).device),
            )
            keys, values = decoded_attention.decode(codec, index, context, self.encoder.dtype)
            tensors |= {f"layers.{index}.packed.keys": keys, f"layers.{index}.packed.values": values}
        config = TurboConfig.from_preset("exact")
        return TurboKVCache.from_tensors(config, cache.geometry, cache.identity, self.codec(config), tensors)

    def _place(self, cache: TurboKVCache) -> None:
        """Put what a cache stores of each layer beside the layer, where they lie on several devices.

        Raises:
            ValueError: the cache lies on another device than the model, or is of a pool and the model on several.
        """
        if not self.encoder.is_spread:
            # Kernels would read it there, and not wait for what that device still computes.
            if cache.device != self.encoder.device:
                places = f"the cache is on {cache.device}, and the model on {self.encoder.device}"
                raise ValueError(f"{places}: move it, by cache.to('{self.encoder.device}')")
            return
        if isinstance(cache, PooledContexts):
            raise ValueError("the model lies on several devices, but contexts of a pool on one: read them from a cache")
        cache.place(self.encoder.device, layer_devices(self.encoder))
