# SPDX-License-Identifier: Apache-2.0
# CUDA, where it is there. Its headers alone run the kernels in tests (tests/cuemu); nvcc from 12 on
# compiles them for devices.
find_path(EBBTIDE_CUDA_INCLUDE cuda_runtime.h
  HINTS ENV CUDA_HOME ENV CUDA_PATH
  PATHS /usr/local/cuda /usr/lib/cuda /usr/lib/nvidia-cuda-toolkit
  PATH_SUFFIXES include
  DOC "folder of cuda_runtime.h: tests run kernels without a GPU")
if(EBBTIDE_TESTS AND NOT EBBTIDE_CUDA_INCLUDE)
  message(STATUS "cuda_runtime.h not found: tests of CUDA kernels are not run")
endif()

option(EBBTIDE_CUDA "compile the CUDA kernels where nvcc 12 or later is found" ${PROJECT_IS_TOP_LEVEL})
option(EBBTIDE_GPU_TESTS "build the tests and the benchmark that need a GPU (scripts/gpu)" OFF)
if(EBBTIDE_CUDA)
  set(CMAKE_CUDA_ARCHITECTURES 90 CACHE STRING "devices to compile for; scripts/check cuda: 80;90;100")
  find_program(EBBTIDE_NVCC nvcc HINTS ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin)
  if(EBBTIDE_NVCC)
    execute_process(COMMAND ${EBBTIDE_NVCC} --version OUTPUT_VARIABLE version)
    string(REGEX MATCH "release ([0-9.]+)" version "${version}")
    if(CMAKE_MATCH_1 VERSION_GREATER_EQUAL 12)
      set(CMAKE_CUDA_COMPILER ${EBBTIDE_NVCC})
      if(CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
        set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE})
      endif()
      enable_language(CUDA)
      if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know that nvcc 12 has it.
        set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
        set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
      endif()
    endif()
  endif()
  if(NOT CMAKE_CUDA_COMPILER_LOADED)
    message(STATUS "nvcc 12 or later not found: CUDA kernels are not compiled for devices")
  endif()
endif()

# Kernels and their launches, for devices. A spilled register is an error. Products and sums are fused
# only where the source says so, as in ebbtide_simd_sources: emulator and device round alike.
#   ebbtide_cuda_library(gpu_cuda SRCS a.cc b_cuda.cu PUBLIC ebbtide::gpu)
function(ebbtide_cuda_library name)
  ebbtide_library(${name} ${ARGN})
  set(least 1000)
  foreach(architecture IN LISTS CMAKE_CUDA_ARCHITECTURES)
    string(REGEX MATCH "^[0-9]+" number "${architecture}")
    if(number AND number LESS least)
      set(least ${number})
    endif()
  endforeach()
  if(least LESS 1000)  # "native" and the like say nothing.
    target_compile_definitions(ebbtide_${name} PUBLIC EBBTIDE_CUDA_CAPABILITY_MIN=${least})
  endif()
  target_include_directories(ebbtide_${name} SYSTEM PUBLIC ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  target_compile_options(ebbtide_${name} PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:-fmad=false -Xptxas=-warn-spills,-warn-lmem-usage
      -Xcompiler=-Wall,-Wextra>)
endfunction()
