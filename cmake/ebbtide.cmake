# SPDX-License-Identifier: Apache-2.0
# How a folder becomes a target: one static library per folder, one binary per folder of tests.
include(GoogleTest)
add_library(ebbtide_warnings INTERFACE)  # Our targets only; never forced on others.
target_compile_options(ebbtide_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wshadow -Wconversion>
  $<$<CXX_COMPILER_ID:Clang>:-Wthread-safety>)
add_custom_target(ebbtide_tests)  # Every test binary of this configuration.

# One static library for one folder.
#   ebbtide_library(storage SRCS a.cc b.cc PUBLIC ebbtide::base PRIVATE PkgConfig::XXHASH)
function(ebbtide_library folder)
  cmake_parse_arguments(arg "" "" "SRCS;PUBLIC;PRIVATE" ${ARGN})
  add_library(ebbtide_${folder} STATIC ${arg_SRCS})
  add_library(ebbtide::${folder} ALIAS ebbtide_${folder})
  target_compile_features(ebbtide_${folder} PUBLIC cxx_std_20)
  target_include_directories(ebbtide_${folder} PUBLIC ${PROJECT_SOURCE_DIR})
  target_link_libraries(ebbtide_${folder} PUBLIC ${arg_PUBLIC} PRIVATE ${arg_PRIVATE} ebbtide_warnings)
  ebbtide_instrument(ebbtide_${folder} ${arg_PUBLIC} ${arg_PRIVATE})
  set_property(GLOBAL APPEND PROPERTY EBBTIDE_LIBRARIES ebbtide_${folder})
endfunction()

# One test binary for one folder of tests. A test that reaches gRPC has the label `grpc`.
#   ebbtide_test(storage_test SRCS a_test.cc DEPS ebbtide::storage [LABELS slow] [TIMEOUT 60])
# TIMEOUT: seconds for each test on a busy machine; five times as long under a sanitizer.
function(ebbtide_test name)
  cmake_parse_arguments(arg "" "TIMEOUT" "SRCS;DEPS;LABELS" ${ARGN})
  set(sources ${arg_SRCS})
  list(TRANSFORM sources PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/)
  set_property(GLOBAL APPEND PROPERTY EBBTIDE_TEST_SOURCES ${sources})
  ebbtide_reaches_grpc(reaches_grpc ${arg_DEPS})
  add_executable(${name} ${arg_SRCS})
  target_link_libraries(${name} PRIVATE ${arg_DEPS} ebbtide_warnings GTest::gmock_main)
  ebbtide_instrument(${name} ${arg_DEPS})
  if(reaches_grpc AND EBBTIDE_TSAN)
    set_target_properties(${name} PROPERTIES EXCLUDE_FROM_ALL ON)
    return()
  endif()
  if(reaches_grpc)
    list(APPEND arg_LABELS grpc)
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  if(EBBTIDE_TSAN OR EBBTIDE_UBSAN)
    math(EXPR arg_TIMEOUT "5 * ${arg_TIMEOUT}")
  endif()
  add_dependencies(ebbtide_tests ${name})
  set(properties TIMEOUT ${arg_TIMEOUT})
  if(arg_LABELS)
    list(REMOVE_DUPLICATES arg_LABELS)
    list(JOIN arg_LABELS "." labels)  # Discovery keeps one; ctest -L slow finds "unit.slow" too.
    list(APPEND properties LABELS "${labels}")
  endif()
  gtest_discover_tests(${name} DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60
    NO_PRETTY_VALUES PROPERTIES ${properties})
endfunction()

# Says in ctest's report why the tests in the sources that follow are not built.
function(ebbtide_test_not_run name reason)
  list(TRANSFORM ARGN PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/ OUTPUT_VARIABLE sources)
  set_property(GLOBAL APPEND PROPERTY EBBTIDE_TEST_SOURCES ${sources})
  add_test(NAME ${name} COMMAND ${CMAKE_COMMAND} -E echo "not run: ${reason}")
  set_tests_properties(${name} PROPERTIES SKIP_REGULAR_EXPRESSION "not run")
endfunction()

# One libFuzzer binary (clang, preset `fuzz`); `scripts/check fuzz` runs each for a while.
#   ebbtide_fuzz(bytes_fuzz SRCS bytes_fuzz.cc DEPS ebbtide::base)
function(ebbtide_fuzz name)
  cmake_parse_arguments(arg "" "" "SRCS;DEPS" ${ARGN})
  if(NOT TARGET ebbtide_fuzz_targets)
    add_custom_target(ebbtide_fuzz_targets)
  endif()
  add_executable(${name} ${arg_SRCS})
  target_link_libraries(${name} PRIVATE ${arg_DEPS} ebbtide_warnings)
  target_link_options(${name} PRIVATE -fsanitize=fuzzer)
  add_dependencies(ebbtide_fuzz_targets ${name})
endfunction()

# Sources that use Highway. Its targets (AVX-512, AVX2, SSE4) are chosen at run time; x86-64-v2 is
# their floor, so that no scalar target is generated. Products and sums are fused only where the
# source says so: bounds and bit-for-bit promises depend on it.
function(ebbtide_simd_sources)
  set_property(SOURCE ${ARGN} APPEND PROPERTY COMPILE_OPTIONS
    -ffp-contract=off $<$<NOT:$<CONFIG:Debug>>:-O3>)
  if(CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64")
    set_property(SOURCE ${ARGN} APPEND PROPERTY COMPILE_OPTIONS -march=x86-64-v2)
    set_property(SOURCE ${ARGN} APPEND PROPERTY COMPILE_DEFINITIONS HWY_DISABLE_PCLMUL_AES)
  endif()
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
