// The memory of one call of an operator: its argument struct, and what the addresses in it point
// to, whatever the operator. The runtime of the tests' library takes an image of every call and
// runs it there, so that guard bands, poison and misalignment need no help from the tests; it can
// write it to a file, which replay.cpp runs under a sanitizer.
//
// Which words of a struct are addresses nobody lists: those that lie in memory that the runtime was
// told of. A number that happens to would be a double of 1e-310, or a size of terabytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <memory>
#include <string>
#include <vector>

namespace emulator {

// So many bytes between guard bands, which the address sanitizer watches, or check() where there is
// none. They lie to 64 bytes as `like` does, and `shift` bytes further on.
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
  bool is_list;    // of the host's: it holds addresses itself
  size_t element;  // bytes of each
};

inline constexpr size_t kMostCopied = size_t{1} << 30;  // what is larger stays where it is

class Image {
 public:
  using Find = std::function<const KnownMemory*(uintptr_t address)>;

  // Of what lies there now. `misaligned` of the tensors, -1 for all, in the order of their
  // addresses in the struct, begin `shift` bytes further on than they do, by whole elements.
  Image(const void* args, size_t bytes, const Find& known, size_t shift, int64_t misaligned);
  explicit Image(std::istream& file);

  void* args() const { return pieces_.front().now(); }
  // The struct, and the lists that it points to, as a plan may see them: addresses of tensors tell
  // their alignment alone.
  std::vector<std::vector<char>> blind() const;
  int64_t tensors() const;

  // After the run: no guard band was written; what was computed goes back to where it came from.
  void finish(const std::string& what);
  void keep();                           // what lies there now, for a file
  void write(std::ostream& file) const;  // what lay there before and what lies there now
  // Where a run of what was read from a file came to something else; empty if it did not.
  std::string difference() const;

 private:
  struct Piece {
    uintptr_t address;
    size_t bytes;
    size_t element = 1;
    size_t shift = 0;
    bool is_list = false;
    std::vector<char> before{}, after{};
    std::unique_ptr<Guarded> place{};  // none for what is too large to be copied
    char* now() const { return place ? place->data() : reinterpret_cast<char*>(address); }
  };
  struct Address {  // at a word of a piece: a byte of another
    int64_t piece, at, target, offset;
  };

  void find_addresses(size_t piece, const Find& known);
  void place();

  std::vector<Piece> pieces_;  // the struct is the first
  std::vector<Address> addresses_;
};

}  // namespace emulator
