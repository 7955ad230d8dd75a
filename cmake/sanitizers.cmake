# SPDX-License-Identifier: Apache-2.0
# Sanitizers of our own code. The address sanitizer comes from the preset's flags; the other two need
# to know who includes gRPC.
option(EBBTIDE_UBSAN "undefined behaviour sanitizer on what includes no gRPC header" OFF)
option(EBBTIDE_TSAN "thread sanitizer, without the tests that reach gRPC" OFF)

# Whether one of `targets` is gRPC or protobuf: then its headers are included.
function(ebbtide_includes_grpc result)
  set(${result} OFF PARENT_SCOPE)
  foreach(target IN LISTS ARGN)
    if(target MATCHES "^(ebbtide::proto|ebbtide_proto|gRPC::.*|protobuf::.*)$")
      set(${result} ON PARENT_SCOPE)
    endif()
  endforeach()
endfunction()

# Whether one of `targets` is or links gRPC, through however many of our libraries.
function(ebbtide_reaches_grpc result)
  ebbtide_includes_grpc(reaches ${ARGN})
  foreach(target IN LISTS ARGN)
    if(NOT reaches AND TARGET ${target} AND target MATCHES "^ebbtide")
      get_target_property(libraries ${target} LINK_LIBRARIES)
      ebbtide_reaches_grpc(reaches ${libraries})
    endif()
  endforeach()
  set(${result} ${reaches} PARENT_SCOPE)
endfunction()

# Prepares our target that links what follows. A file that includes gRPC takes six times as long to
# compile with the undefined behaviour sanitizer, so those are left out.
function(ebbtide_instrument target)
  ebbtide_includes_grpc(includes ${ARGN})
  if(EBBTIDE_UBSAN AND NOT includes)
    target_compile_options(${target} PRIVATE -fsanitize=undefined -fno-sanitize-recover=undefined)
  endif()
endfunction()

if(EBBTIDE_UBSAN)
  add_link_options(-fsanitize=undefined)
endif()

# Debian's Abseil is not instrumented, so the sanitizer sees no order in what its mutexes protect.
# The linker sends our calls through wrappers that tell it. gRPC has locks of its own, unseen.
if(EBBTIDE_TSAN)
  add_compile_options(-fsanitize=thread)
  add_link_options(-fsanitize=thread)
  add_library(ebbtide_tsan_abseil STATIC ${PROJECT_SOURCE_DIR}/tests/support/tsan_abseil.cc)
  target_link_libraries(ebbtide_tsan_abseil PUBLIC absl::synchronization)
  file(STRINGS ${PROJECT_SOURCE_DIR}/tests/support/tsan_abseil.cc wrapped REGEX "^WRAP\\(")
  foreach(line IN LISTS wrapped)
    string(REGEX REPLACE "^WRAP\\(([A-Za-z0-9_]+).*" "\\1" symbol "${line}")
    # Undefined, so that the wrapper is linked where only a shared library asks for the symbol.
    target_link_options(ebbtide_tsan_abseil INTERFACE
      "LINKER:--wrap=${symbol}" "LINKER:--undefined=__wrap_${symbol}")
  endforeach()
  link_libraries(ebbtide_tsan_abseil)
endif()
