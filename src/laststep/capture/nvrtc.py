"""Compile CUDA C++ at run time and launch it, through the libraries that torch has already loaded.

Knows nothing of what is compiled. Every call releases the GIL: compiling takes a few hundred
milliseconds on another core. CUDA only; any failure raises `CompilerMissing` or `LaunchFailed`, and
the caller continues without kernels.
"""

from __future__ import annotations

import ctypes

import torch


class CompilerMissing(RuntimeError):
    """There is no compiler here, or it does not take the source."""


class LaunchFailed(RuntimeError):
    """The driver refused to load or to launch."""


def compile_source(source: str, device: int) -> bytes:
    """Return the machine code of a source for one device."""
    nvrtc = _load_compiler()
    major, minor = torch.cuda.get_device_capability(device)
    program = ctypes.c_void_p()
    _check(
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"laststep.cu", 0, None, None
        ),
        "nvrtcCreateProgram",
    )
    try:
        options = (f"--gpu-architecture=sm_{major}{minor}".encode(), b"--std=c++17")
        array = (ctypes.c_char_p * len(options))(*options)
        if nvrtc.nvrtcCompileProgram(program, len(options), array) != 0:
            raise CompilerMissing(_log_of(nvrtc, program))
        size = ctypes.c_size_t()
        _check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
        code = ctypes.create_string_buffer(size.value)
        _check(nvrtc.nvrtcGetCUBIN(program, code), "nvrtcGetCUBIN")
        return code.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


class CompiledModule:
    """Machine code, loaded into the context that is current."""

    def __init__(self, code: bytes) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._module = ctypes.c_void_p()
        result = self._driver.cuModuleLoadData(ctypes.byref(self._module), code)
        if result != 0:
            raise LaunchFailed(f"cuModuleLoadData: CUDA error {result}")

    def kernel(self, name: str) -> Kernel:
        function = ctypes.c_void_p()
        result = self._driver.cuModuleGetFunction(
            ctypes.byref(function), self._module, name.encode()
        )
        if result != 0:
            raise LaunchFailed(f"cuModuleGetFunction {name}: CUDA error {result}")
        return Kernel(self._driver, function)


class Kernel:
    """A function of a module; it takes pointers only."""

    def __init__(self, driver: ctypes.CDLL, function: ctypes.c_void_p) -> None:
        self._driver = driver
        self._function = function

    def launch(self, blocks: int, threads: int, *arguments: torch.Tensor) -> None:
        """Launch on the current stream. The tensors MUST stay alive until it has run there."""
        pointers = [ctypes.c_void_p(argument.data_ptr()) for argument in arguments]
        array = (ctypes.c_void_p * len(pointers))(
            *(ctypes.addressof(pointer) for pointer in pointers)
        )
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        result = self._driver.cuLaunchKernel(
            self._function, blocks, 1, 1, threads, 1, 1, 0, stream, array, None
        )
        if result != 0:
            raise LaunchFailed(f"cuLaunchKernel: CUDA error {result}")


def _load_compiler() -> ctypes.CDLL:
    if torch.version.cuda is None:
        raise CompilerMissing("this torch is not built for CUDA")
    name = f"libnvrtc.so.{torch.version.cuda.partition('.')[0]}"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise CompilerMissing(str(error)) from error


def _check(result: int, call: str) -> None:
    if result != 0:
        raise CompilerMissing(f"{call}: NVRTC error {result}")


def _log_of(nvrtc: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value or 1)
    nvrtc.nvrtcGetProgramLog(program, text)
    return text.value.decode(errors="replace")
