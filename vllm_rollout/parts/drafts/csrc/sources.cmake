# The memory of answers, for CMakeLists.txt.
set(folder ${CMAKE_CURRENT_LIST_DIR})
target_sources(_C PRIVATE ${folder}/memory.cpp ${folder}/memory_type.cpp ${folder}/places.cpp)
# Probabilities are the reference's, bit for bit, on machines that would fuse a product and a sum, too.
set_source_files_properties(${folder}/places.cpp PROPERTIES COMPILE_OPTIONS -ffp-contract=off)
