"""The wire: messages, references, keys, digests, errors. Pure: no I/O, no torch."""

from .digest import content_digest
from .errors import BrokerError
from .form import Form, Part
from .keys import Digest, Key, Kind, as_key
from .reference import PROTOCOL_VERSION, Reference, is_reference

__all__ = [
    "PROTOCOL_VERSION",
    "BrokerError",
    "Digest",
    "Form",
    "Key",
    "Kind",
    "Part",
    "Reference",
    "as_key",
    "content_digest",
    "is_reference",
]
