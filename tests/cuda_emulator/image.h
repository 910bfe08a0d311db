// The memory of one call of any operator: its argument struct, and the memory that the addresses in
// it point to. The runtime of the tests' library takes an image of every call and runs the call
// there, so that guard bands, poison and misalignment need no help from the tests. It can write the
// image to a file, which replay.cpp runs under a sanitizer.
//
// There is no list of the words of a struct that are addresses: a word is one if it lies in memory
// that the runtime was told of. A number that does by chance would be a double of 1e-310, or a size
// of terabytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <memory>
#include <string>
#include <vector>

namespace emulator {

// Memory of `bytes` bytes between guard bands, which the address sanitizer watches, or check() in
// other builds. It begins like `like` modulo 64 bytes, plus `shift` bytes.
class Guarded {
 public:
  Guarded(size_t bytes, uintptr_t like, size_t shift);
  ~Guarded();
  char* data() const { return data_; }
  void check(const std::string& what) const;  // throws if a guard band was written

 private:
  std::unique_ptr<char[]> block_;
  size_t block_bytes_, bytes_;
  char* data_;
};

struct KnownMemory {
  uintptr_t begin, end;
  bool is_list;    // memory of the host that itself holds addresses
  size_t element;  // bytes of each
};

inline constexpr size_t kMostCopied = size_t{1} << 30;  // larger memory is not copied

class Image {
 public:
  using Find = std::function<const KnownMemory*(uintptr_t address)>;

  // An image of the present memory. The tensor number `misaligned`, in the order of addresses in
  // the struct (-1: all tensors), begins `shift` bytes later, in whole elements.
  Image(const void* args, size_t bytes, const Find& known, size_t shift, int64_t misaligned);
  explicit Image(std::istream& file);

  void* args() const { return pieces_.front().now(); }
  // The struct, and the lists that it points to, as a plan may see them: of the addresses of
  // tensors only the alignment is left.
  std::vector<std::vector<char>> blind() const;
  int64_t tensors() const;

  // After the run: checks that no guard band was written, and copies results to the original
  // memory.
  void finish(const std::string& what);
  void keep();                           // keeps the present contents, for a file
  void write(std::ostream& file) const;  // the contents before the run and after it
  // Where a run of an image from a file gave another result; empty if nowhere.
  std::string difference() const;

 private:
  struct Piece {
    uintptr_t address;
    size_t bytes;
    size_t element = 1;
    size_t shift = 0;
    bool is_list = false;
    std::vector<char> before{}, after{};
    std::unique_ptr<Guarded> place{};  // null if too large to be copied
    char* now() const { return place ? place->data() : reinterpret_cast<char*>(address); }
  };
  struct Address {  // a word of a piece that points to a byte of another
    int64_t piece, at, target, offset;
  };

  void find_addresses(size_t piece, const Find& known);
  void place();

  std::vector<Piece> pieces_;  // the struct is the first
  std::vector<Address> addresses_;
};

}  // namespace emulator
