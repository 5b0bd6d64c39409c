# The ISPC kernels, one object per target. Included by csrc/CMakeLists.txt; sets NEO_ISPC_OBJECTS and appends to NEO_DEFINITIONS.
#
# NEO_ISPC=AUTO  use ISPC if there is one, otherwise say that only the C++ kernels are built
# NEO_ISPC=ON    fail without ISPC
# NEO_ISPC=OFF   C++ kernels only
# The compiler is -DCMAKE_ISPC_COMPILER, $ISPC, .ispc/bin/ispc (scripts/get_ispc.sh), or the ispc on PATH, in this order. A compiler
# that was named has to work. Each target is compiled by itself with its own symbol suffix, so that NEO_ISA can force it at run time.

set(NEO_ISPC "AUTO" CACHE STRING "Build the ISPC kernels: ON, OFF or AUTO")
set_property(CACHE NEO_ISPC PROPERTY STRINGS AUTO ON OFF)
set(NEO_ISPC_OBJECTS)

# Finds a compiler that starts; the result is not cached, so that installing ISPC and configuring again is enough.
function(neo_find_ispc out_path out_version)
  set(candidates)
  set(named "")
  if(CMAKE_ISPC_COMPILER)
    set(named "${CMAKE_ISPC_COMPILER}")
  elseif(NOT "$ENV{ISPC}" STREQUAL "")
    set(named "$ENV{ISPC}")
  endif()
  if(named)
    find_program(neo_ispc_candidate "${named}" NO_PACKAGE_ROOT_PATH)
    set(candidates "${neo_ispc_candidate}")
    unset(neo_ispc_candidate CACHE)
  else()
    find_program(neo_ispc_candidate ispc)
    set(candidates "${CMAKE_CURRENT_SOURCE_DIR}/../.ispc/bin/ispc" "${neo_ispc_candidate}")
    unset(neo_ispc_candidate CACHE)
  endif()
  foreach(candidate IN LISTS candidates)
    if(EXISTS "${candidate}")
      get_filename_component(candidate "${candidate}" ABSOLUTE)
      execute_process(COMMAND "${candidate}" --version OUTPUT_VARIABLE said ERROR_VARIABLE said RESULT_VARIABLE status)
      if(status EQUAL 0 AND said MATCHES "ISPC[^,]*, ([0-9]+\\.[0-9]+[0-9.]*)")
        set(${out_path} "${candidate}" PARENT_SCOPE)
        set(${out_version} "${CMAKE_MATCH_1}" PARENT_SCOPE)
        return()
      endif()
    endif()
  endforeach()
  if(named)
    message(FATAL_ERROR "neo_compile: ${named} was given as the ISPC compiler, but is not one that starts.")
  endif()
  set(${out_path} "" PARENT_SCOPE)
endfunction()

# Adds the kernels for one ISPC target; `suffix` (may be empty) ends the symbols, `definition` enables them in kernel_table.cpp.
function(neo_add_ispc target suffix definition)
  set(source "${CMAKE_CURRENT_SOURCE_DIR}/paged_attention.ispc")
  set(object "${CMAKE_CURRENT_BINARY_DIR}/paged_attention_${target}.o")
  file(GLOB headers "${CMAKE_CURRENT_SOURCE_DIR}/*.isph")
  set(flags -O3 --pic --werror --target=${target})
  if(suffix)
    list(APPEND flags -DNEO_SUFFIX=${suffix})
  endif()
  add_custom_command(
    OUTPUT "${object}"
    COMMAND "${neo_ispc}" ${flags} "${source}" -o "${object}"
    DEPENDS "${source}" ${headers} "${CMAKE_CURRENT_LIST_FILE}"
    COMMENT "ISPC kernels for ${target}"
    VERBATIM)
  set_source_files_properties("${object}" PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
  set(NEO_ISPC_OBJECTS ${NEO_ISPC_OBJECTS} "${object}" PARENT_SCOPE)
  set(NEO_DEFINITIONS ${NEO_DEFINITIONS} ${definition} PARENT_SCOPE)
endfunction()

string(TOUPPER "${NEO_ISPC}" neo_ispc_mode)
if(neo_ispc_mode MATCHES "^(AUTO|)$")
  set(neo_ispc_mode AUTO)
elseif(neo_ispc_mode MATCHES "^(ON|1|YES|TRUE)$")
  set(neo_ispc_mode ON)
elseif(neo_ispc_mode MATCHES "^(OFF|0|NO|FALSE)$")
  set(neo_ispc_mode OFF)
else()
  message(FATAL_ERROR "neo_compile: NEO_ISPC is '${NEO_ISPC}'; it can be AUTO, ON or OFF.")
endif()

set(neo_ispc "")
if(NOT neo_ispc_mode STREQUAL "OFF")
  neo_find_ispc(neo_ispc neo_ispc_version)
endif()
if(neo_ispc AND CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  neo_add_ispc(avx512skx-x16 _avx512skx NEO_ISPC_AVX512)
  neo_add_ispc(avx2-i32x8 _avx2 NEO_ISPC_AVX2)
elseif(neo_ispc AND CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64|ARM64)$")
  neo_add_ispc(neon-i32x4 "" NEO_ISPC_NEON)
endif()

if(NEO_ISPC_OBJECTS)
  message(STATUS "neo_compile: attention kernels in ISPC ${neo_ispc_version} (${neo_ispc}) and C++")
elseif(neo_ispc_mode STREQUAL "ON" AND neo_ispc)
  message(FATAL_ERROR "neo_compile: NEO_ISPC=ON, but there is no ISPC target for ${CMAKE_SYSTEM_PROCESSOR}.")
elseif(neo_ispc_mode STREQUAL "ON")
  message(FATAL_ERROR "neo_compile: NEO_ISPC=ON, but there is no ISPC compiler. Run scripts/get_ispc.sh, or set ISPC=/path/to/ispc.")
elseif(neo_ispc_mode STREQUAL "OFF")
  message(STATUS "neo_compile: attention kernels in C++ only (NEO_ISPC=OFF)")
else()
  message(NOTICE "neo_compile: attention kernels in C++ only, since no ISPC compiler was found. The ISPC kernels are quicker: "
                 "run scripts/get_ispc.sh, or set ISPC=/path/to/ispc, and build again.")
endif()
