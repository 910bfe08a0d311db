#include "image.h"

#include <algorithm>
#include <cstring>
#include <istream>
#include <ostream>
#include <stdexcept>

#include "emulator.h"

#if defined(EMULATOR_ADDRESS)
#include <sanitizer/asan_interface.h>
#endif

namespace emulator {
namespace {

constexpr size_t kGuardBytes = 256;
constexpr size_t kAlignment = 64;

uintptr_t word_at(const char* bytes, int64_t at) {
  uintptr_t word;
  std::memcpy(&word, bytes + at, sizeof(word));
  return word;
}

void set_word(char* bytes, int64_t at, uintptr_t word) {
  std::memcpy(bytes + at, &word, sizeof(word));
}

template <class T>
void write_number(std::ostream& file, T value) {
  file.write(reinterpret_cast<const char*>(&value), sizeof(value));
}

template <class T>
void read_number(std::istream& file, T& value) {
  file.read(reinterpret_cast<char*>(&value), sizeof(value));
}

}  // namespace

Guarded::Guarded(size_t bytes, uintptr_t like, size_t shift)
    : block_bytes_(bytes + shift + 2 * kGuardBytes + 2 * kAlignment), bytes_(bytes) {
  block_.reset(new char[block_bytes_]);
  std::fill_n(block_.get(), block_bytes_, static_cast<char>(kPoison));
  const uintptr_t begin = reinterpret_cast<uintptr_t>(block_.get()) + kGuardBytes;
  const uintptr_t aligned = (begin + kAlignment - 1) / kAlignment * kAlignment;
  data_ = reinterpret_cast<char*>(aligned + like % kAlignment + shift);
  const auto first = reinterpret_cast<uintptr_t>(block_.get()), last = first + block_bytes_;
  guard_bands()[first] = reinterpret_cast<uintptr_t>(data_);
  guard_bands()[reinterpret_cast<uintptr_t>(data_) + bytes_] = last;
#if defined(EMULATOR_ADDRESS)
  __asan_poison_memory_region(block_.get(), static_cast<size_t>(data_ - block_.get()));
  __asan_poison_memory_region(data_ + bytes_, block_.get() + block_bytes_ - data_ - bytes_);
#endif
}

Guarded::~Guarded() {
  guard_bands().erase(reinterpret_cast<uintptr_t>(block_.get()));
  guard_bands().erase(reinterpret_cast<uintptr_t>(data_) + bytes_);
#if defined(EMULATOR_ADDRESS)
  __asan_unpoison_memory_region(block_.get(), block_bytes_);
#endif
}

void Guarded::check([[maybe_unused]] const std::string& what) const {
#if !defined(EMULATOR_ADDRESS)
  const auto is_poison = [](char byte) { return byte == static_cast<char>(kPoison); };
  if (!std::all_of(block_.get(), data_, is_poison) ||
      !std::all_of(data_ + bytes_, block_.get() + block_bytes_, is_poison)) {
    fail(what + " wrote beside a tensor of " + std::to_string(bytes_) + " bytes");
  }
#endif
}

Image::Image(const void* args, size_t bytes, const Find& known, size_t shift, int64_t misaligned) {
  pieces_.push_back({.address = reinterpret_cast<uintptr_t>(args), .bytes = bytes});
  for (size_t piece = 0; piece < pieces_.size(); ++piece) {
    if (piece == 0 || pieces_[piece].is_list) find_addresses(piece, known);
  }
  int64_t tensor = 0;
  for (size_t i = 1; i < pieces_.size(); ++i) {
    if (pieces_[i].is_list) continue;
    const size_t element = pieces_[i].element;
    if (misaligned < 0 || misaligned == tensor) pieces_[i].shift = shift / element * element;
    ++tensor;
  }
  place();
}

void Image::find_addresses(size_t piece, const Find& known) {
  const auto bytes = static_cast<int64_t>(pieces_[piece].bytes);
  for (int64_t at = 0; at + 8 <= bytes; at += 8) {
    const uintptr_t word = word_at(reinterpret_cast<const char*>(pieces_[piece].address), at);
    const KnownMemory* const memory = known(word);
    if (!memory) continue;
    auto found = std::find_if(pieces_.begin() + 1, pieces_.end(),
                              [&](const Piece& other) { return other.address == memory->begin; });
    if (found == pieces_.end()) {
      pieces_.push_back({.address = memory->begin,
                         .bytes = memory->end - memory->begin,
                         .element = memory->element,
                         .is_list = memory->is_list});
      found = pieces_.end() - 1;
    }
    addresses_.push_back({static_cast<int64_t>(piece), at, found - pieces_.begin(),
                          static_cast<int64_t>(word - memory->begin)});
  }
}

void Image::place() {
  for (Piece& piece : pieces_) {
    if (piece.bytes > kMostCopied) continue;
    piece.place = std::make_unique<Guarded>(piece.bytes, piece.address, piece.shift);
    const char* const from =
        piece.before.empty() ? reinterpret_cast<const char*>(piece.address) : piece.before.data();
    std::copy_n(from, piece.bytes, piece.now());
  }
  for (const Address& word : addresses_) {
    set_word(pieces_[word.piece].now(), word.at,
             reinterpret_cast<uintptr_t>(pieces_[word.target].now() + word.offset));
  }
}

std::vector<std::vector<char>> Image::blind() const {
  std::vector<std::vector<char>> copies(pieces_.size());
  for (size_t i = 0; i < pieces_.size(); ++i) {
    const Piece& piece = pieces_[i];
    if (i == 0 || piece.is_list) copies[i].assign(piece.now(), piece.now() + piece.bytes);
  }
  for (const Address& word : addresses_) {
    const uintptr_t there = word_at(pieces_[word.piece].now(), word.at);
    const uintptr_t list = reinterpret_cast<uintptr_t>(copies[word.target].data()) + word.offset;
    // On a page that nobody may read.
    set_word(copies[word.piece].data(), word.at,
             pieces_[word.target].is_list ? list : 256 + there % 256);
  }
  return copies;
}

int64_t Image::tensors() const {
  return std::count_if(pieces_.begin() + 1, pieces_.end(),
                       [](const Piece& piece) { return !piece.is_list; });
}

void Image::finish(const std::string& what) {
  for (const Piece& piece : pieces_) {
    if (piece.place) piece.place->check(what);
  }
  for (size_t i = 1; i < pieces_.size(); ++i) {
    const Piece& piece = pieces_[i];
    if (!piece.place || piece.is_list) continue;
    std::copy_n(piece.now(), piece.bytes, reinterpret_cast<char*>(piece.address));
  }
}

void Image::keep() {
  for (Piece& piece : pieces_) {
    if (!piece.place) fail("memory of " + std::to_string(piece.bytes) + " bytes is not written");
    std::vector<char>& kept = piece.before.empty() ? piece.before : piece.after;
    kept.assign(piece.now(), piece.now() + piece.bytes);
  }
}

void Image::write(std::ostream& file) const {
  write_number(file, pieces_.size());
  for (const Piece& piece : pieces_) {
    write_number(file, piece.address);
    write_number(file, piece.bytes);
    write_number(file, piece.shift);
    write_number(file, piece.is_list);
    for (const std::vector<char>* bytes : {&piece.before, &piece.after}) {
      file.write(bytes->data(), static_cast<std::streamsize>(piece.bytes));
    }
  }
  write_number(file, addresses_.size());
  for (const Address& word : addresses_) write_number(file, word);
}

Image::Image(std::istream& file) {
  size_t count = 0;
  read_number(file, count);
  pieces_.resize(count);
  for (Piece& piece : pieces_) {
    read_number(file, piece.address);
    read_number(file, piece.bytes);
    read_number(file, piece.shift);
    read_number(file, piece.is_list);
    for (std::vector<char>* bytes : {&piece.before, &piece.after}) {
      bytes->resize(piece.bytes);
      file.read(bytes->data(), static_cast<std::streamsize>(piece.bytes));
    }
  }
  read_number(file, count);
  addresses_.resize(count);
  for (Address& word : addresses_) read_number(file, word);
  if (!file) throw std::runtime_error("the file of a call is cut short");
  place();
}

std::string Image::difference() const {
  for (size_t i = 1; i < pieces_.size(); ++i) {
    const Piece& piece = pieces_[i];
    if (piece.is_list) continue;
    const auto [ours, theirs] =
        std::mismatch(piece.now(), piece.now() + piece.bytes, piece.after.begin());
    if (theirs != piece.after.end()) {
      return "byte " + std::to_string(ours - piece.now()) + " of " + std::to_string(piece.bytes) +
             " of tensor " + std::to_string(i);
    }
  }
  return "";
}

}  // namespace emulator
