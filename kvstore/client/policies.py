"""Quota, TTL and pin of a path: the master's calls for them, for asyncio and for threads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvstore.client.deadline import seconds
from kvstore.client.masterlink import AsyncMasterCalls, MasterCalls
from kvstore.core.errors import InvalidRequest
from kvstore.core.limits import METADATA_TIMEOUT_S
from kvstore.core.types import U63_MAX
from kvstore.pb import master_pb2 as m
from kvstore.rpc import methods

_DEFAULT_S = METADATA_TIMEOUT_S


class Policy(NamedTuple):
    """What a directory says for all below it, or the pin of a file."""

    path: str
    """From the client's root; where that is not the store's, what is not below it reads ``store:/…``."""
    inode: int
    quota_bytes: int
    """0 = none."""
    ttl_s: float
    """Blocks that nobody used for so long go; 0 = none."""
    pinned: bool
    used_bytes: int
    """Published below it, each block once."""
    files: int
    """With bytes, below it."""
    counting: bool
    """The policy is new, and what lay there before is still being counted."""


class Holding(NamedTuple):
    """All that holds for a path, the nearest policy first."""

    inode: int
    policies: tuple[Policy, ...]

    def named(self, root: str) -> Holding:
        """The same, with paths as a client of this root names them, see `below`."""
        return Holding(self.inode, tuple(below(root, self.policies)))

    @property
    def own(self) -> Policy | None:
        """What is said of this very path."""
        return self.policies[0] if self.policies and self.policies[0].inode == self.inode else None

    @property
    def pin(self) -> Policy | None:
        """The policy by which it is pinned."""
        return next((policy for policy in self.policies if policy.pinned), None)

    @property
    def ttl(self) -> Policy | None:
        """The policy that says its TTL."""
        return next((policy for policy in self.policies if policy.ttl_s), None)

    @property
    def quotas(self) -> tuple[Policy, ...]:
        """All quotas that it counts for."""
        return tuple(policy for policy in self.policies if policy.quota_bytes)


def below(root: str, policies: Iterable[Policy]) -> list[Policy]:
    """The same, with paths as a client names them whose root is `root` (no slashes at its ends) in the store."""
    if not root:
        return list(policies)
    return [policy._replace(path=_below(root, policy.path)) for policy in policies]


def _below(root: str, path: str) -> str:
    rest = path.removeprefix(f"/{root}")
    return f"store:{path}" if rest == path or (rest and rest[0] != "/") else rest or "/"


class AsyncPolicies:
    """For asyncio. Every method raises `KvError`."""

    def __init__(self, link: AsyncMasterCalls) -> None:
        self._link = link

    async def set(
        self, path: str, *, base: int = 0, quota_bytes: int | None = None, ttl_s: float | None = None,
        pinned: bool | None = None, timeout_s: float = _DEFAULT_S,
    ) -> Holding:  # fmt: skip
        """Say it; None leaves it as it is, 0 and False take it away. What holds for the path then."""
        request = _set_request(path, base, quota_bytes, ttl_s, pinned)
        return _holding(await self._link.call(methods.SET_POLICY, request, seconds(timeout_s)))

    async def of(self, path: str, *, base: int = 0, timeout_s: float = _DEFAULT_S) -> Holding:
        request = m.GetPolicyRequest(base=base, path=path)
        return _holding(await self._link.call(methods.GET_POLICY, request, seconds(timeout_s)))

    async def all(self, *, timeout_s: float = _DEFAULT_S) -> list[Policy]:
        """In order of their paths."""
        reply = await self._link.call(methods.LIST_POLICIES, m.ListPoliciesRequest(), seconds(timeout_s))
        return _policies(reply.policies)


class Policies:
    """For threads: the methods of `AsyncPolicies`, see there."""

    def __init__(self, link: MasterCalls) -> None:
        self._link = link

    def set(
        self, path: str, *, base: int = 0, quota_bytes: int | None = None, ttl_s: float | None = None,
        pinned: bool | None = None, timeout_s: float = _DEFAULT_S,
    ) -> Holding:  # fmt: skip
        request = _set_request(path, base, quota_bytes, ttl_s, pinned)
        return _holding(self._link.call(methods.SET_POLICY, request, seconds(timeout_s)))

    def of(self, path: str, *, base: int = 0, timeout_s: float = _DEFAULT_S) -> Holding:
        request = m.GetPolicyRequest(base=base, path=path)
        return _holding(self._link.call(methods.GET_POLICY, request, seconds(timeout_s)))

    def all(self, *, timeout_s: float = _DEFAULT_S) -> list[Policy]:
        reply = self._link.call(methods.LIST_POLICIES, m.ListPoliciesRequest(), seconds(timeout_s))
        return _policies(reply.policies)


def _set_request(
    path: str, base: int, quota_bytes: int | None, ttl_s: float | None, pinned: bool | None
) -> m.SetPolicyRequest:
    if quota_bytes is not None and not 0 <= quota_bytes <= U63_MAX:
        raise InvalidRequest(f"a quota of {quota_bytes} bytes is out of range")
    return m.SetPolicyRequest(base=base, path=path, quota_bytes=quota_bytes, ttl_s=ttl_s, pinned=pinned)


def _holding(reply: m.PolicyReply) -> Holding:
    return Holding(reply.inode, tuple(_policies(reply.policies)))


def _policies(messages: Iterable[m.Policy]) -> list[Policy]:
    return [Policy(*(getattr(message, name) for name in Policy._fields)) for message in messages]
