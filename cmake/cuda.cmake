# SPDX-License-Identifier: Apache-2.0
# CUDA, where it is there. Its headers alone run kernels under tests/cuemu; nvcc compiles them too.
find_path(EBBTIDE_CUDA_INCLUDE cuda_runtime.h
  HINTS ENV CUDA_HOME ENV CUDA_PATH
  PATHS /usr/local/cuda /usr/lib/cuda /usr/lib/nvidia-cuda-toolkit
  PATH_SUFFIXES include
  DOC "folder of cuda_runtime.h: tests run kernels without a GPU")
if(NOT EBBTIDE_CUDA_INCLUDE)
  message(STATUS "cuda_runtime.h not found: tests of CUDA kernels are not run")
endif()
