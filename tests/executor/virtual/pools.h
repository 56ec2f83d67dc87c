// A part of device.cpp: how memory of the device is divided.

constexpr int64_t MiB = 1 << 20;

int64_t rounded_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// Bytes of a segment that the driver gave: in use, or free for requests on the same stream.
struct Piece {
  std::pair<int64_t, bool> pool;  // stream, whether for small requests
  int64_t num_bytes;
  bool used = false;
  Piece *before = nullptr, *behind = nullptr;  // in its segment
};

// How torch's allocator for CUDA divides memory, as far as sizes go (c10/cuda/CUDACachingAllocator.cpp: round_size,
// get_allocation_size, should_split, try_merge_blocks, release_cached_blocks). A request becomes a multiple of 512 B, is
// cut from the smallest free piece of its stream's pool that holds it, and goes back there. The driver gives 2 MiB for
// requests up to 1 MiB, 20 MiB below 10 MiB, else a multiple of 2 MiB. Expandable segments are one for each pool, which
// grows at its end by 2 or 20 MiB.
struct Pools {
  std::mutex mutex;
  std::map<std::pair<int64_t, bool>, std::multimap<int64_t, Piece*>> free;
  std::map<std::pair<int64_t, bool>, Piece*> ends;  // of expandable segments
  std::vector<Piece*> leaving;                      // freed while other streams may use them
  bool expandable = false;
  int64_t capacity = INT64_MAX, num_retries = 0, num_ooms = 0;
  int64_t active = 0, reserved = 0, split = 0;  // bytes: in use, of segments, free in segments that are in use
  int64_t active_peak = 0, reserved_peak = 0, split_peak = 0;

  Piece* take(int64_t num_bytes) {
    const std::lock_guard lock(mutex);
    const int64_t size = rounded_up(num_bytes, 512);
    const std::pair<int64_t, bool> pool{current_stream, size <= MiB};
    auto found = free[pool].lower_bound(size);
    Piece* piece = found == free[pool].end() ? grown(pool, size) : found->second;
    if (found != free[pool].end()) {
      out(piece);
    }
    const int64_t rest = piece->num_bytes - size;
    if (pool.second || expandable ? rest >= 512 : rest > MiB) {
      auto* left = new Piece{pool, rest, false, piece, piece->behind};
      (piece->behind ? piece->behind->before : piece->behind) = left;
      piece->behind = left;
      piece->num_bytes = size;
      if (auto end = ends.find(pool); end != ends.end() && end->second == piece) {
        end->second = left;
      }
      in(left);
    }
    piece->used = true;
    active += piece->num_bytes;
    note();
    return piece;
  }

  void give(Piece* piece, bool later) {
    const std::lock_guard lock(mutex);
    if (later) {
      leaving.push_back(piece);
    } else {
      give_now(piece);
    }
  }

  // The host has waited for the device: what has left is free.
  void settle() {
    const std::lock_guard lock(mutex);
    for (auto* piece : leaving) {
      give_now(piece);
    }
    leaving.clear();
  }

  void empty() {
    settle();
    const std::lock_guard lock(mutex);
    shrink();
  }

  void reset_peaks() {
    const std::lock_guard lock(mutex);
    active_peak = active, reserved_peak = reserved, split_peak = split;
  }

 private:
  static bool is_split(const Piece* piece) { return piece->before || piece->behind; }

  void in(Piece* piece) {
    free[piece->pool].emplace(piece->num_bytes, piece);
    split += is_split(piece) ? piece->num_bytes : 0;
  }

  void out(Piece* piece) {
    auto& pool = free[piece->pool];
    auto [first, last] = pool.equal_range(piece->num_bytes);
    pool.erase(std::find_if(first, last, [&](const auto& entry) { return entry.second == piece; }));
    split -= is_split(piece) ? piece->num_bytes : 0;
  }

  void give_now(Piece* piece) {
    piece->used = false;
    active -= piece->num_bytes;
    for (auto* next : {piece->before, piece->behind}) {
      if (next && !next->used) {
        out(next);
        auto *left = next == piece->before ? next : piece, *right = left == piece ? next : piece;
        left->num_bytes += right->num_bytes;
        left->behind = right->behind;
        if (right->behind) {
          right->behind->before = left;
        }
        if (auto end = ends.find(piece->pool); end != ends.end() && end->second == right) {
          end->second = left;
        }
        delete right;
        piece = left;
      }
    }
    in(piece);
    note();
  }

  int64_t missing(const std::pair<int64_t, bool>& pool, int64_t size) {
    if (!expandable) {
      return pool.second ? 2 * MiB : size < 10 * MiB ? 20 * MiB : rounded_up(size, 2 * MiB);
    }
    const auto* end = ends[pool];
    return rounded_up(size - (end && !end->used ? end->num_bytes : 0), (pool.second ? 2 : 20) * MiB);
  }

  Piece* grown(const std::pair<int64_t, bool>& pool, int64_t size) {
    if (reserved + missing(pool, size) > capacity) {
      ++num_retries;
      shrink();
    }
    const int64_t more = missing(pool, size);
    if (reserved + more > capacity) {
      ++num_ooms;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", size, " B");
    }
    reserved += more;
    auto* end = expandable ? ends[pool] : nullptr;
    if (end && !end->used) {
      out(end);
      end->num_bytes += more;
      return end;
    }
    auto* piece = new Piece{pool, more, false, end, nullptr};
    if (expandable) {
      (end ? end->behind : piece->behind) = end ? piece : nullptr;
      ends[pool] = piece;
    }
    return piece;
  }

  // Give the driver back what is free: whole segments, or whole pages of expandable ones.
  void shrink() {
    for (auto& [pool, pieces] : free) {
      const auto page = (pool.second ? 2 : 20) * MiB;
      std::vector<Piece*> all;
      for (auto& entry : pieces) {
        all.push_back(entry.second);
      }
      for (auto* piece : all) {
        const auto bytes = expandable ? piece->num_bytes / page * page : is_split(piece) ? 0 : piece->num_bytes;
        if (bytes) {
          out(piece);
          reserved -= bytes;
          piece->num_bytes -= bytes;
          if (piece->num_bytes || expandable) {
            in(piece);
          } else {
            delete piece;
          }
        }
      }
    }
  }

  void note() {
    active_peak = std::max(active_peak, active);
    reserved_peak = std::max(reserved_peak, reserved);
    split_peak = std::max(split_peak, split);
  }
};
Pools pools;
