from tests.rig import readonly, rig

__all__ = ["readonly", "rig"]
