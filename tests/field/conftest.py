from tests.rig import readonly

__all__ = ["readonly"]
