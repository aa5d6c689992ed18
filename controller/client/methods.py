"""What a client asks about adapters, once for each of the two clients.

What it is: one method a request whose answer is one reply, blocking and for asyncio. What it is
not: how a request is asked (`client_blocking`, `client_async`), or what streams. One rule: a method
here is nothing but a message's fields, and its answer.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TypeVar

from controller.client.calls import NEW
from controller.client.pooling import (
    Classification,
    Embedding,
    PoolingCall,
    classify_request,
    embed_request,
)
from controller.client.session import answer_of
from messages.requests import (
    ActivateAdapter,
    ActivateBatch,
    AdapterDone,
    AdapterShown,
    AdaptersListed,
    BatchDone,
    CancelDone,
    CancelGeneration,
    Classify,
    DeactivateAdapter,
    Embed,
    EvictAdapter,
    HoldAdapter,
    ListAdapters,
    LoadAdapter,
    PoolingDone,
    ReleaseAdapter,
    RemoveAdapter,
    Request,
    ShowAdapter,
    ShowStatus,
    StageAdapter,
    StatusShown,
    TextPrompt,
)

R = TypeVar("R")


class Asking(ABC):
    """A client that waits for each answer."""

    @abstractmethod
    def _ask(self, request: Request, reply_type: type[R], timeout_s: float | None) -> R:
        """The answer to a request; raises its error."""

    @abstractmethod
    def _pool(
        self, request: Embed | Classify, timeout_s: float | None, attempts: int
    ) -> PoolingCall:
        """The call of a request, settled."""

    def load(
        self, adapter: str, path: str = "", replace: bool = False, timeout_s: float | None = None
    ) -> AdapterDone:
        """Bring an adapter to the host; with `replace`, other bytes may take over a known name."""
        return self._ask(LoadAdapter(NEW, adapter, path, replace), AdapterDone, timeout_s)

    def stage(self, adapter: str, path: str = "", timeout_s: float | None = None) -> AdapterDone:
        """Bring an adapter to page-locked memory, loading it first if need be."""
        return self._ask(StageAdapter(NEW, adapter, path), AdapterDone, timeout_s)

    def activate(self, adapter: str, path: str = "", timeout_s: float | None = None) -> AdapterDone:
        """Bring an adapter into a device slot, loading and staging it first if need be."""
        return self._ask(ActivateAdapter(NEW, adapter, path), AdapterDone, timeout_s)

    def hold(self, adapter: str, path: str = "", timeout_s: float | None = None) -> AdapterDone:
        """Exempt an adapter from every eviction, activating it first if need be."""
        return self._ask(HoldAdapter(NEW, adapter, path), AdapterDone, timeout_s)

    def release(self, adapter: str, timeout_s: float | None = None) -> AdapterDone:
        """End a hold; the adapter stays where it is until a policy needs its room."""
        return self._ask(ReleaseAdapter(NEW, adapter), AdapterDone, timeout_s)

    def deactivate(self, adapter: str, timeout_s: float | None = None) -> AdapterDone:
        """Take an adapter out of its slot; it stays pinned."""
        return self._ask(DeactivateAdapter(NEW, adapter), AdapterDone, timeout_s)

    def evict(self, adapter: str, timeout_s: float | None = None) -> AdapterDone:
        """Drop an adapter's weights everywhere; its source and history are kept."""
        return self._ask(EvictAdapter(NEW, adapter), AdapterDone, timeout_s)

    def remove(
        self, adapter: str, force: bool = False, timeout_s: float | None = None
    ) -> AdapterDone:
        """Forget an adapter; `force` also ends a hold and waits for running requests."""
        return self._ask(RemoveAdapter(NEW, adapter, force), AdapterDone, timeout_s)

    def activate_batch(self, adapters: Iterable[str], timeout_s: float | None = None) -> BatchDone:
        """Bring a batch's whole active set into slots at once, confirmed by the engine."""
        return self._ask(ActivateBatch(NEW, tuple(adapters)), BatchDone, timeout_s)

    def list(self, timeout_s: float | None = None) -> AdaptersListed:
        """Every known adapter, in order of name."""
        return self._ask(ListAdapters(NEW), AdaptersListed, timeout_s)

    def show(self, adapter: str, timeout_s: float | None = None) -> AdapterShown:
        """One adapter, whole."""
        return self._ask(ShowAdapter(NEW, adapter), AdapterShown, timeout_s)

    def status(self, timeout_s: float | None = None) -> StatusShown:
        """The controller, its engine and its budgets."""
        return self._ask(ShowStatus(NEW), StatusShown, timeout_s)

    def cancel(self, request_id: str, timeout_s: float | None = None) -> CancelDone:
        """End a generation, of whatever client; `found` is False where nothing was running."""
        return self._ask(CancelGeneration(NEW, request_id), CancelDone, timeout_s)

    def embed(
        self,
        texts: str | Iterable[TextPrompt],
        adapter: str | None = None,
        *,
        timeout_s: float | None = None,
        attempts: int = 1,
    ) -> Embedding:
        """A vector for each text (or list of token ids), with an adapter or the base model.

        With `attempts` over 1 a retryable failure begins again under a new id.
        """
        call = self._pool(embed_request(texts, adapter), timeout_s, attempts)
        return call.embedding(answer_of(call, PoolingDone))

    def classify(
        self,
        texts: str | Iterable[TextPrompt],
        adapter: str | None = None,
        *,
        timeout_s: float | None = None,
        attempts: int = 1,
    ) -> Classification:
        """A score for each label of the model and each text, with an adapter or the base model.

        With `attempts` over 1 a retryable failure begins again under a new id.
        """
        call = self._pool(classify_request(texts, adapter), timeout_s, attempts)
        return call.classification(answer_of(call, PoolingDone))


class AsyncAsking(ABC):
    """A client whose answers are awaited."""

    @abstractmethod
    async def _ask(self, request: Request, reply_type: type[R], timeout_s: float | None) -> R:
        """The answer to a request; raises its error."""

    @abstractmethod
    async def _pool(
        self, request: Embed | Classify, timeout_s: float | None, attempts: int
    ) -> PoolingCall:
        """The call of a request, settled."""

    async def load(
        self, adapter: str, path: str = "", replace: bool = False, timeout_s: float | None = None
    ) -> AdapterDone:
        """Bring an adapter to the host; with `replace`, other bytes may take over a known name."""
        return await self._ask(LoadAdapter(NEW, adapter, path, replace), AdapterDone, timeout_s)

    async def stage(
        self, adapter: str, path: str = "", timeout_s: float | None = None
    ) -> AdapterDone:
        """Bring an adapter to page-locked memory, loading it first if need be."""
        return await self._ask(StageAdapter(NEW, adapter, path), AdapterDone, timeout_s)

    async def activate(
        self, adapter: str, path: str = "", timeout_s: float | None = None
    ) -> AdapterDone:
        """Bring an adapter into a device slot, loading and staging it first if need be."""
        return await self._ask(ActivateAdapter(NEW, adapter, path), AdapterDone, timeout_s)

    async def hold(
        self, adapter: str, path: str = "", timeout_s: float | None = None
    ) -> AdapterDone:
        """Exempt an adapter from every eviction, activating it first if need be."""
        return await self._ask(HoldAdapter(NEW, adapter, path), AdapterDone, timeout_s)

    async def release(self, adapter: str, timeout_s: float | None = None) -> AdapterDone:
        """End a hold; the adapter stays where it is until a policy needs its room."""
        return await self._ask(ReleaseAdapter(NEW, adapter), AdapterDone, timeout_s)

    async def deactivate(self, adapter: str, timeout_s: float | None = None) -> AdapterDone:
        """Take an adapter out of its slot; it stays pinned."""
        return await self._ask(DeactivateAdapter(NEW, adapter), AdapterDone, timeout_s)

    async def evict(self, adapter: str, timeout_s: float | None = None) -> AdapterDone:
        """Drop an adapter's weights everywhere; its source and history are kept."""
        return await self._ask(EvictAdapter(NEW, adapter), AdapterDone, timeout_s)

    async def remove(
        self, adapter: str, force: bool = False, timeout_s: float | None = None
    ) -> AdapterDone:
        """Forget an adapter; `force` also ends a hold and waits for running requests."""
        return await self._ask(RemoveAdapter(NEW, adapter, force), AdapterDone, timeout_s)

    async def activate_batch(
        self, adapters: Iterable[str], timeout_s: float | None = None
    ) -> BatchDone:
        """Bring a batch's whole active set into slots at once, confirmed by the engine."""
        return await self._ask(ActivateBatch(NEW, tuple(adapters)), BatchDone, timeout_s)

    async def list(self, timeout_s: float | None = None) -> AdaptersListed:
        """Every known adapter, in order of name."""
        return await self._ask(ListAdapters(NEW), AdaptersListed, timeout_s)

    async def show(self, adapter: str, timeout_s: float | None = None) -> AdapterShown:
        """One adapter, whole."""
        return await self._ask(ShowAdapter(NEW, adapter), AdapterShown, timeout_s)

    async def status(self, timeout_s: float | None = None) -> StatusShown:
        """The controller, its engine and its budgets."""
        return await self._ask(ShowStatus(NEW), StatusShown, timeout_s)

    async def cancel(self, request_id: str, timeout_s: float | None = None) -> CancelDone:
        """End a generation, of whatever client; `found` is False where nothing was running."""
        return await self._ask(CancelGeneration(NEW, request_id), CancelDone, timeout_s)

    async def embed(
        self,
        texts: str | Iterable[TextPrompt],
        adapter: str | None = None,
        *,
        timeout_s: float | None = None,
        attempts: int = 1,
    ) -> Embedding:
        """A vector for each text (or list of token ids), with an adapter or the base model.

        With `attempts` over 1 a retryable failure begins again under a new id.
        """
        call = await self._pool(embed_request(texts, adapter), timeout_s, attempts)
        return call.embedding(answer_of(call, PoolingDone))

    async def classify(
        self,
        texts: str | Iterable[TextPrompt],
        adapter: str | None = None,
        *,
        timeout_s: float | None = None,
        attempts: int = 1,
    ) -> Classification:
        """A score for each label of the model and each text, with an adapter or the base model.

        With `attempts` over 1 a retryable failure begins again under a new id.
        """
        call = await self._pool(classify_request(texts, adapter), timeout_s, attempts)
        return call.classification(answer_of(call, PoolingDone))
