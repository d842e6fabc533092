from tests.gpu.conftest import _warm_gpu, bench, driven, fake, faked, make_bench, real
from tests.rig import readonly

__all__ = ["_warm_gpu", "bench", "driven", "fake", "faked", "make_bench", "readonly", "real"]
