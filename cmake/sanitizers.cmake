# SPDX-License-Identifier: Apache-2.0
# Sanitizers of our own code. The address sanitizer comes from the preset's flags; the other two need
# to know which code is ours.
option(EBBTIDE_UBSAN "undefined behaviour sanitizer on libraries and tests without gRPC" OFF)
option(EBBTIDE_TSAN "thread sanitizer" OFF)

# Targets that include gRPC's headers are left out (ebbtide_library(... GRPC)): each such file takes
# six times as long to compile with it.
function(ebbtide_instrument target)
  if(EBBTIDE_UBSAN)
    target_compile_options(${target} PRIVATE -fsanitize=undefined -fno-sanitize-recover=undefined)
  endif()
endfunction()

if(EBBTIDE_UBSAN)
  add_link_options(-fsanitize=undefined)
endif()

# Debian's Abseil is not instrumented, so the sanitizer sees no order in what its mutexes protect.
# The linker sends our calls through wrappers that tell it.
if(EBBTIDE_TSAN)
  add_compile_options(-fsanitize=thread)
  add_link_options(-fsanitize=thread)
  add_library(ebbtide_tsan_abseil STATIC ${PROJECT_SOURCE_DIR}/tests/support/tsan_abseil.cc)
  target_link_libraries(ebbtide_tsan_abseil PUBLIC absl::synchronization)
  file(STRINGS ${PROJECT_SOURCE_DIR}/tests/support/tsan_abseil.cc wrapped REGEX "^WRAP\\(")
  foreach(line IN LISTS wrapped)
    string(REGEX REPLACE "^WRAP\\(([A-Za-z0-9_]+).*" "\\1" symbol "${line}")
    target_link_options(ebbtide_tsan_abseil INTERFACE "LINKER:--wrap=${symbol}")
  endforeach()
  link_libraries(ebbtide_tsan_abseil)
endif()
