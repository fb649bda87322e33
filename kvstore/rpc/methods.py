"""Every unary call as a typed value, so that links need no stubs and a transport can be swapped."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

from google.protobuf.message import Message

from kvstore.pb import master_pb2 as m
from kvstore.pb import worker_pb2 as w

Q = TypeVar("Q", bound=Message)
A = TypeVar("A", bound=Message)


class Method(NamedTuple, Generic[Q, A]):
    path: str
    request: type[Q]
    reply: type[A]
    idempotent: bool
    """Whether the same request may be sent again after an ambiguous failure (rule 21)."""


LOOKUP = Method("/kvstore.pb.Master/Lookup", m.LookupRequest, m.LookupReply, True)
PUBLISH = Method("/kvstore.pb.Master/Publish", m.PublishRequest, m.PublishReply, True)
MKDIR = Method("/kvstore.pb.Master/Mkdir", m.MkdirRequest, m.MkdirReply, False)
REMOVE = Method("/kvstore.pb.Master/Remove", m.RemoveRequest, m.RemoveReply, False)
RENAME = Method("/kvstore.pb.Master/Rename", m.RenameRequest, m.RenameReply, False)
SET_ATTR = Method("/kvstore.pb.Master/SetAttr", m.SetAttrRequest, m.SetAttrReply, True)
STATFS = Method("/kvstore.pb.Master/Statfs", m.StatfsRequest, m.StatfsReply, True)
CLUSTER_MAP = Method("/kvstore.pb.Master/ClusterMap", m.ClusterMapRequest, m.ClusterMapReply, True)
EVENTS = Method("/kvstore.pb.Master/Events", m.EventsRequest, m.EventsReply, True)
SET_POLICY = Method("/kvstore.pb.Master/SetPolicy", m.SetPolicyRequest, m.PolicyReply, True)
GET_POLICY = Method("/kvstore.pb.Master/GetPolicy", m.GetPolicyRequest, m.PolicyReply, True)
LIST_POLICIES = Method("/kvstore.pb.Master/ListPolicies", m.ListPoliciesRequest, m.ListPoliciesReply, True)
REGISTER = Method("/kvstore.pb.Master/Register", m.RegisterRequest, m.RegisterReply, True)
HEARTBEAT = Method("/kvstore.pb.Master/Heartbeat", m.HeartbeatRequest, m.HeartbeatReply, True)
REPORT = Method("/kvstore.pb.Master/Report", m.ReportRequest, m.ReportReply, False)
RECOVER = Method("/kvstore.pb.Master/Recover", m.RecoverRequest, m.RecoverReply, True)
WORKER_STAT = Method("/kvstore.pb.Worker/Stat", w.WorkerStatRequest, w.WorkerStatReply, True)
WORKER_DESCRIBE = Method("/kvstore.pb.Worker/Describe", w.DescribeRequest, w.DescribeReply, True)
WORKER_GIVE_UP = Method("/kvstore.pb.Worker/GiveUp", w.GiveUpRequest, w.GiveUpReply, True)

LIST = Method("/kvstore.pb.Master/List", m.ListRequest, m.ListPage, True)
"""Streams its reply; one page here is one message."""

READ_PATH = "/kvstore.raw.Blocks/Read"
WRITE_PATH = "/kvstore.raw.Blocks/Write"
