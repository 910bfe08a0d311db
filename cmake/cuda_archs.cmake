# The architectures that the CUDA library is built for: `asked` ("80;90", "all" or empty: those of
# the visible devices, and without one all).
#
# "all" is code for every kind of device that there are kernels for, and PTX for all others, also
# older than the newest of them (sm_110): their driver compiles it at the first call, for a minute.
function(onepass_cuda_archs result asked nvcc)
  execute_process(COMMAND ${nvcc} --list-gpu-arch OUTPUT_VARIABLE known ERROR_QUIET)
  set(all 80-real 90)
  if(known MATCHES "compute_120")  # from CUDA 12.8 on
    set(all 80-real 90-real 100 120-real)
  endif()

  string(REGEX REPLACE "[ ,]+" ";" archs "${asked}")
  string(REGEX REPLACE "([0-9]+)\\.([0-9])" "\\1\\2" archs "${archs}")  # as TORCH_CUDA_ARCH_LIST has it
  if(archs STREQUAL "")
    execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
      OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
    if(NOT failed)
      string(REGEX MATCHALL "[0-9]+\\.[0-9]+" archs "${found}")
      list(REMOVE_DUPLICATES archs)
      string(REPLACE "." "" archs "${archs}")
      list(FILTER archs EXCLUDE REGEX "^[1-7][0-9]$")  # for these there are no kernels
      foreach(arch IN LISTS archs)
        if(NOT known MATCHES "compute_${arch}")  # a device newer than nvcc
          set(archs all)
        endif()
      endforeach()
    endif()
  endif()
  if(archs STREQUAL "" OR archs STREQUAL "all")
    set(archs ${all})
  endif()
  foreach(arch IN LISTS archs)
    if(NOT arch MATCHES "^[0-9]+[af]?(-real|-virtual)?$")
      message(FATAL_ERROR
        "onepass: ONEPASS_CUDA_ARCHS must be a list of architectures, such as 80;90, or all, got "
        "${arch}.")
    endif()
    if(arch MATCHES "^[1-7][0-9](-|$)")
      message(FATAL_ERROR
        "onepass: ONEPASS_CUDA_ARCHS must name architectures from 80 on, got ${arch}: its kernels need "
        "the tensor cores and the asynchronous copies of sm_80.")
    endif()
  endforeach()
  set(${result} "${archs}" PARENT_SCOPE)
endfunction()

# nvcc's options that compile a source for `archs`, which are as above. `borders`: the architectures
# from which on its PTX is another one. Between two of them, code of a -real architecture is made
# from the PTX of the least one of the build: the same code as from PTX of its own, in less time.
function(onepass_cuda_code result archs borders)
  foreach(border IN LISTS borders)
    set(least_${border} 9999)
  endforeach()
  foreach(pass least options)
    foreach(arch IN LISTS archs)
      string(REGEX REPLACE "-.*" "" number "${arch}")
      set(from ${number})
      if(number MATCHES "^[0-9]+$")  # 90a and the like have PTX for themselves alone
        foreach(border IN LISTS borders)
          if(number GREATER_EQUAL border)
            set(group least_${border})
          endif()
        endforeach()
        if(pass STREQUAL "least" AND number LESS ${group})
          set(${group} ${number})
        endif()
        if(arch MATCHES "-real$")
          set(from ${${group}})
        endif()
      endif()
      if(pass STREQUAL "options")
        if(NOT arch MATCHES "-virtual$")
          list(APPEND options "--generate-code=arch=compute_${from},code=sm_${number}")
        endif()
        if(NOT arch MATCHES "-real$")
          list(APPEND options "--generate-code=arch=compute_${number},code=compute_${number}")
        endif()
      endif()
    endforeach()
  endforeach()
  set(${result} "${options}" PARENT_SCOPE)
endfunction()
