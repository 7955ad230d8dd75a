# SPDX-License-Identifier: Apache-2.0
# How a folder becomes a target: one static library per folder, one binary per folder of tests.
include(GoogleTest)
add_library(ebbtide_warnings INTERFACE)  # Our targets only; never forced on others.
target_compile_options(ebbtide_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wshadow -Wconversion>
  $<$<CXX_COMPILER_ID:Clang>:-Wthread-safety>)

# One static library for one folder.
#   ebbtide_library(storage SRCS a.cc b.cc PUBLIC ebbtide::base PRIVATE xxhash [GRPC])
# GRPC: its sources include gRPC's or protobuf's headers; see cmake/sanitizers.cmake.
function(ebbtide_library folder)
  cmake_parse_arguments(arg "GRPC" "" "SRCS;PUBLIC;PRIVATE" ${ARGN})
  add_library(ebbtide_${folder} STATIC ${arg_SRCS})
  add_library(ebbtide::${folder} ALIAS ebbtide_${folder})
  target_compile_features(ebbtide_${folder} PUBLIC cxx_std_20)
  target_include_directories(ebbtide_${folder} PUBLIC ${PROJECT_SOURCE_DIR})
  target_link_libraries(ebbtide_${folder} PUBLIC ${arg_PUBLIC} PRIVATE ${arg_PRIVATE} ebbtide_warnings)
  if(NOT arg_GRPC)
    ebbtide_instrument(ebbtide_${folder})
  endif()
endfunction()

# One test binary for one folder of tests.
#   ebbtide_test(storage_test SRCS a_test.cc DEPS ebbtide::storage [LABELS slow] [TIMEOUT 60] [GRPC])
# GRPC: as above, and the label `grpc`, which the thread sanitizer leaves out since Debian's gRPC is
# not instrumented. TIMEOUT: seconds for each test, on a busy machine and under a sanitizer.
function(ebbtide_test name)
  cmake_parse_arguments(arg "GRPC" "TIMEOUT" "SRCS;DEPS;LABELS" ${ARGN})
  add_executable(${name} ${arg_SRCS})
  target_link_libraries(${name} PRIVATE ${arg_DEPS} ebbtide_warnings GTest::gmock_main)
  if(arg_GRPC)
    list(APPEND arg_LABELS grpc)
  else()
    ebbtide_instrument(${name})
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  string(REPLACE ";" "\\;" labels "${arg_LABELS}")  # One argument, whatever their number.
  gtest_discover_tests(${name} DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60
    PROPERTIES LABELS "${labels}" TIMEOUT ${arg_TIMEOUT})
  list(TRANSFORM arg_SRCS PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/)
  set_property(GLOBAL APPEND PROPERTY EBBTIDE_TEST_SOURCES ${arg_SRCS})
endfunction()

# A test file that no target names would never run: fail the configure step instead.
function(ebbtide_check_every_test_is_registered)
  file(GLOB_RECURSE found CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*_test.cc)
  get_property(known GLOBAL PROPERTY EBBTIDE_TEST_SOURCES)
  list(REMOVE_ITEM found ${known})
  if(found)
    message(FATAL_ERROR "tests without a target: ${found}")
  endif()
endfunction()
