// Runs one operator of the attention family on tensors from files: `attention CASE`, see case.h.
// The number `path` says who takes the call: 0 the back end, as its plan decides; 1 the kernels of
// tiles; 2 the plain ones, which take what tiles do as well. The number `far` moves tensors
// that are not packed to where their sequences or pages (1), heads (2) or rows (3) are so far apart
// that 32 bits do not count the elements between the first and the last.
#include "cuda/attention/attention.h"

#include <sys/mman.h>

#include <cstring>
#include <vector>

#include "case.h"
#include "cuda/backend.h"

namespace onepass::cuda {

// Weak: a program may be linked with some of the kernels alone, and then runs those.
__attribute__((weak)) Operator<AttentionForward> tiled_attention_forward();
__attribute__((weak)) Operator<AttentionBackward> tiled_attention_backward();
__attribute__((weak)) Operator<AttentionForward> plain_attention_forward();
__attribute__((weak)) Operator<AttentionBackward> plain_attention_backward();
__attribute__((weak)) AttentionBackend attention_backend();
__attribute__((weak)) Operator<AttentionDecode> attention_decode();

}  // namespace onepass::cuda

namespace onepass {
namespace {

void get_rows(const Case& call, const std::string& name, Strided& rows) {
  call.get(name.c_str(), rows.data);
  if (!rows.data) return;
  call.get((name + "_batch_stride").c_str(), rows.batch_stride);
  call.get((name + "_head_stride").c_str(), rows.head_stride);
  call.get((name + "_row_stride").c_str(), rows.row_stride);
}

#define GET_ROWS(field) get_rows(call, #field, args.field)

void get_attention(const Case& call, Attention& args) {
  GET_ROWS(query), GET_ROWS(key), GET_ROWS(value), GET_ROWS(bias), GET_ROWS(mask);
  GET(alibi_slopes), GET(alibi_batch_stride), GET(sinks), GET(cu_seq_q), GET(cu_seq_k);
  GET(seqused_k), GET(block_table), GET(block_table_stride), GET(page_size);
  GET(seed), GET(batch), GET(heads), GET(kv_heads), GET(seq_q), GET(seq_k), GET(total_q);
  GET(head_dim), GET(value_dim), GET(window_left), GET(window_right), GET(query_offset);
  GET(key_offset), GET(bottom_right);
  GET(whole_q), GET(whole_k), GET(scale), GET(softcap), GET(dropout_p), GET(allow_tf32);
  GET(dtype), GET(bias_dtype), GET(sinks_dtype);
}

AttentionForward forward_of(const Case& call) {
  AttentionForward args{};
  get_attention(call, args);
  GET_ROWS(output), GET(lse), GET(lse_rest);
  return args;
}

AttentionBackward backward_of(const Case& call) {
  AttentionBackward args{};
  get_attention(call, args);
  GET_ROWS(doutput), GET_ROWS(output), GET(lse), GET(lse_rest), GET(dlse), GET_ROWS(dquery);
  GET_ROWS(dkey), GET_ROWS(dvalue), GET_ROWS(dbias), GET(dbias_numel), GET(dslopes), GET(dsinks);
  GET(deterministic);
  return args;
}

AttentionDecode decode_of(const Case& call) {
  AttentionDecode args{};
  get_attention(call, args);
  GET(cache_batch_idx), GET(cache_leftpad), GET_ROWS(new_key), GET_ROWS(new_value), GET(new_rows);
  GET(rotary_cos), GET(rotary_sin), GET(rotary_dim), GET(rotary_dtype), GET(rotary_interleaved);
  GET(rotary_by_row), GET_ROWS(output), GET(lse);
  return args;
}

// What a plan gets to see of a device's memory: that it is there, and how it is aligned.
template <class T>
void hide(T*& pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  if (pointer) pointer = reinterpret_cast<T*>(256 + address % 256);  // on a page that none may read
}

template <class... T>
void hide_all(T&... pointers) {
  (hide(pointers), ...);
}

void hide_attention(Attention& args) {
  hide_all(args.query.data, args.key.data, args.value.data, args.bias.data, args.mask.data,
           args.alibi_slopes, args.sinks, args.cu_seq_q, args.cu_seq_k, args.seqused_k,
           args.block_table, args.seed);
}

void hide_memory(AttentionForward& args) {
  hide_attention(args);
  hide_all(args.output.data, args.lse, args.lse_rest);
}

void hide_memory(AttentionBackward& args) {
  hide_attention(args);
  hide_all(args.doutput.data, args.output.data, args.lse, args.lse_rest, args.dlse,
           args.dquery.data, args.dkey.data, args.dvalue.data, args.dbias.data, args.dslopes,
           args.dsinks);
}

void hide_memory(AttentionDecode& args) {
  hide_attention(args);
  hide_all(args.cache_batch_idx, args.cache_leftpad, args.new_key.data, args.new_value.data,
           args.rotary_cos, args.rotary_sin, args.output.data, args.lse);
}

// Tensors whose memory is reserved and, but for the elements themselves, never touched.
class FarApart {
 public:
  explicit FarApart(const Case& call) : far_(std::stoll(call.values.at("far"))) {}

  // (blocks, heads, rows, cols), elements of so many bytes.
  void move(Strided& rows, int64_t blocks, int64_t heads, int64_t count, int64_t cols,
            int64_t bytes) {
    if (far_ == 0 || !rows.data || blocks * heads * count == 0) return;
    const int64_t sizes[] = {blocks, heads, count};
    Strided moved = rows;
    int64_t* const strides[] = {&moved.batch_stride, &moved.head_stride, &moved.row_stride};
    int64_t extent = (cols + 7) / 8 * 8;
    for (int dim : {2, 1, 0}) {
      if (dim + 1 == far_ || *strides[dim] == 0) continue;
      *strides[dim] = extent;
      extent *= sizes[dim];
    }
    int64_t& outermost = *strides[far_ - 1];
    if (outermost != 0) {
      outermost = extent + kFar / (sizes[far_ - 1] - 1) / 8 * 8;
      extent = outermost * sizes[far_ - 1];
    }
    moved.data = mmap(nullptr, static_cast<size_t>(extent * bytes), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (moved.data == MAP_FAILED) emulator::fail("no room to reserve");
    moves_.push_back({rows, moved, {blocks, heads, count}, bytes, cols * bytes});
    copy(moves_.back(), rows, moved);
    rows = moved;
  }

  void move_back() const {
    for (const Move& move : moves_) copy(move, move.far, move.near);
  }

 private:
  static constexpr int64_t kFar = (int64_t{1} << 31) + 64;
  struct Move {
    Strided near, far;
    int64_t sizes[3];
    int64_t bytes, row_bytes;
  };

  static void copy(const Move& move, const Strided& from, const Strided& to) {
    for (int64_t i = 0; i < move.sizes[0] * move.sizes[1] * move.sizes[2]; ++i) {
      const int64_t row = i % move.sizes[2], head = i / move.sizes[2] % move.sizes[1];
      const int64_t block = i / move.sizes[2] / move.sizes[1];
      const auto at = [&](const Strided& rows) {
        return static_cast<char*>(rows.data) +
               move.bytes *
                   (block * rows.batch_stride + head * rows.head_stride + row * rows.row_stride);
      };
      std::memcpy(at(to), at(from), static_cast<size_t>(move.row_bytes));
    }
  }

  int64_t far_;
  std::vector<Move> moves_;
};

void move_attention(const Case& call, FarApart& far, Attention& args) {
  int64_t key_blocks, key_rows;  // sequences, caches or pages, and the rows of each
  call.get("key_blocks", key_blocks), call.get("key_rows", key_rows);
  const int64_t size = size_of(args.dtype);
  far.move(args.query, args.batch, args.heads, args.seq_q, args.head_dim, size);
  far.move(args.key, key_blocks, args.kv_heads, key_rows, args.head_dim, size);
  far.move(args.value, key_blocks, args.kv_heads, key_rows, args.value_dim, size);
  far.move(args.bias, args.batch, args.heads, args.seq_q, args.seq_k, size_of(args.bias_dtype));
  far.move(args.mask, args.batch, args.heads, args.seq_q, args.seq_k, 1);
}

void move_apart(const Case& call, FarApart& far, AttentionForward& args) {
  move_attention(call, far, args);
  far.move(args.output, args.batch, args.heads, args.seq_q, args.value_dim, size_of(args.dtype));
}

void move_apart(const Case& call, FarApart& far, AttentionBackward& args) {
  move_attention(call, far, args);
  const int64_t size = size_of(args.dtype);
  far.move(args.doutput, args.batch, args.heads, args.seq_q, args.value_dim, size);
  far.move(args.output, args.batch, args.heads, args.seq_q, args.value_dim, size);
  far.move(args.dquery, args.batch, args.heads, args.seq_q, args.head_dim, size);
  far.move(args.dkey, args.batch, args.kv_heads, args.seq_k, args.head_dim, size);
  far.move(args.dvalue, args.batch, args.kv_heads, args.seq_k, args.value_dim, size);
}

void move_apart(const Case& call, FarApart& far, AttentionDecode& args) {
  move_attention(call, far, args);
  const int64_t size = size_of(args.dtype);
  far.move(args.new_key, args.batch, args.kv_heads, args.new_rows, args.head_dim, size);
  far.move(args.new_value, args.batch, args.kv_heads, args.new_rows, args.value_dim, size);
  far.move(args.output, args.batch, args.heads, args.seq_q, args.value_dim, size);
}

// As run(), where the plan may not read a device's memory.
template <class Args>
void run_attention(const Case& call, const Operator<Args>& op, Args args) {
  FarApart far(call);
  move_apart(call, far, args);
  Args hidden = args;
  hide_memory(hidden);
  const Plan blind = op.plan(hidden, Machine{.threads = 1});
  const Plan plan = op.plan(args, Machine{.threads = 1});
  if (blind.kernel_name != plan.kernel_name || blind.splits != plan.splits ||
      blind.workspace_bytes != plan.workspace_bytes || blind.rows_per_tile != plan.rows_per_tile) {
    emulator::fail("a plan that depends on where the tensors lie");
  }
  run(op, args);
  far.move_back();
}

// The back end's unless a path is asked for, or there is no back end yet.
template <class Args>
Operator<Args> chosen(const Case& call, const Args& args, Operator<Args> AttentionBackend::* of,
                      Operator<Args> (*tiled)(), Operator<Args> (*plain)()) {
  const int64_t path = std::stoll(call.values.at("path"));
  if (path == 0 && cuda::attention_backend) return cuda::attention_backend().*of;
  const bool take_tiles = path == 0 ? cuda::is_tiled(args) : path == 1;
  if (!(take_tiles ? tiled : plain)) {
    emulator::fail(std::string("linked without ") + (take_tiles ? "tiled" : "plain") + " kernels");
  }
  return take_tiles ? tiled() : plain();
}

}  // namespace
}  // namespace onepass

int main(int argc, char** argv) {
  using namespace onepass;
  return run_case(argc, argv, [](const Case& call, const std::string& op) {
    if (op == "attention_forward") {
      const AttentionForward args = forward_of(call);
      run_attention(call,
                    chosen(call, args, &AttentionBackend::forward, cuda::tiled_attention_forward,
                           cuda::plain_attention_forward),
                    args);
    }
    if (op == "attention_backward") {
      const AttentionBackward args = backward_of(call);
      run_attention(call,
                    chosen(call, args, &AttentionBackend::backward, cuda::tiled_attention_backward,
                           cuda::plain_attention_backward),
                    args);
    }
    if (op == "attention_decode") {
      if (!cuda::attention_decode) emulator::fail("linked without the kernels of decoding");
      run_attention(call, cuda::attention_decode(), decode_of(call));
    }
  });
}
