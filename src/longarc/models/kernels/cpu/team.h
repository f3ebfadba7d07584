// Threads that go through one piece of work after another together.
//
//   member 0  | columns 0..n/2 | wait | rows ... | wait | ...
//   member 1  | columns n/2..n | wait | rows ... | wait | ...
//
// A weight is read from memory by one of them only, and a row of a batch never waits for more than its layer.
#pragma once

#include <atomic>
#include <thread>

#include "gemm.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace longarc {

class Team {
  public:
    int64_t size = 1;

    // Returns when all members have called it as often.
    void wait() {
        if (size == 1) return;
        const int64_t round = round_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
            arrived_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            return;
        }
        for (int64_t tries = 0; round_.load(std::memory_order_acquire) == round;)
            if (++tries > 1000) std::this_thread::yield();
    }

  private:
    alignas(64) std::atomic<int64_t> arrived_{0};
    alignas(64) std::atomic<int64_t> round_{0};
};

struct Stretch {
    int64_t begin, end;
    int64_t size() const { return end - begin; }
};

struct Member {
    Team& team;
    int64_t index;

    void wait() const { team.wait(); }

    // This member's part of `total`; parts begin at multiples of `unit`.
    Stretch part(int64_t total, int64_t unit = 1) const {
        const int64_t units = (total + unit - 1) / unit;
        return {std::min(total, units * index / team.size * unit),
                std::min(total, units * (index + 1) / team.size * unit)};
    }
};

// Calls work(member) in as many threads as the system gives, at most `num_threads`.
template <class Work>
void with_team(int64_t num_threads, Work work) {
    Team team;
#if defined(_OPENMP)
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
#pragma omp single
        team.size = omp_get_num_threads();
        work(Member{team, omp_get_thread_num()});
    }
#else
    work(Member{team, 0});
#endif
}

}  // namespace longarc
