/* The loops of probe.py: threads that read a file into slots of pinned memory and queue copies to a GPU, and threads that
   copy from a GPU to memory of the host.

   The driver is loaded at run time, so building this file needs no header and no library of CUDA. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

enum { MOST_SLOTS = 1024, MOST_STREAMS = 8, MOST_THREADS = 64, POPULATE_WRITE = 23 };

/* How a slot is filled. */
enum { READ, MAPPED, NON_TEMPORAL, NOTHING };

/* A way for bytes to take. probe.py has the same structure. */
typedef struct {
    int file, fill, threads, streams;
    int last_first; /* whether the slot whose copy ended last is used first; otherwise slots take turns */
    int outward;    /* whether bytes are copied from the device */
    int held;       /* slots of each thread, for `probe_save` */
    int fresh;      /* whether the memory of the host was never touched, for `probe_save` */
    uint64_t begin, nbytes, chunk_nbytes, piece_nbytes; /* a thread claims a piece, and copies it in chunks */
    char *slots, *host;
    uint64_t slot_nbytes, slot_count;
    uint64_t device; /* the address on the device, or 0: then no copies are made */
    uint64_t used;   /* set by `probe_load`: the slots that were used */
} Way;

/* A queue of slots, which is a stack as well. */
typedef struct {
    uint64_t begin, end;
    int slots[MOST_SLOTS];
} Line;

/* One run of a way. */
typedef struct {
    Way *way;
    const char *map;
    _Atomic uint64_t next;
    _Atomic int error, rank;
    pthread_mutex_t lock;
    Line free, flying;
    void *streams[MOST_STREAMS], *events[MOST_SLOTS];
} Run;

#define CALLS(CALL)                                           \
    CALL(cuCtxSetCurrent, (void *))                           \
    CALL(cuStreamCreate, (void **, unsigned))                 \
    CALL(cuStreamDestroy_v2, (void *))                        \
    CALL(cuStreamSynchronize, (void *))                       \
    CALL(cuEventCreate, (void **, unsigned))                  \
    CALL(cuEventDestroy_v2, (void *))                         \
    CALL(cuEventRecord, (void *, void *))                     \
    CALL(cuEventQuery, (void *))                              \
    CALL(cuMemcpyHtoDAsync_v2, (uint64_t, void *, size_t, void *)) \
    CALL(cuMemcpyDtoHAsync_v2, (void *, uint64_t, size_t, void *))
#define DECLARE(name, arguments) static int(*name) arguments;
CALLS(DECLARE)

static void *context;
static const int NOT_READY = 600, NON_BLOCKING = 1, WITHOUT_TIMES = 2;

/* The first call that failed, and its code. */
static _Atomic int fault;
static const char *fault_name = "";

static int checked(int code, const char *name) {
    int none = 0;
    if (code && atomic_compare_exchange_strong(&fault, &none, code)) fault_name = name;
    return code;
}
#define DO(name, ...) checked(name(__VA_ARGS__), #name)

/* Load the driver. Return false if it cannot be loaded or has no such function. */
int probe_open(const char *driver, void *its_context) {
    void *library = dlopen(driver, RTLD_NOW | RTLD_LOCAL);
    if (!library) return 0;
#define FIND(name, arguments) \
    if (!(name = (int(*) arguments)dlsym(library, #name))) return 0;
    CALLS(FIND)
    context = its_context;
    return 1;
}

/* Return the code of the first call that failed since the last question, and its name. */
int probe_fault(char *name, size_t nbytes) {
    snprintf(name, nbytes, "%s", fault_name);
    return atomic_exchange(&fault, 0);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static void push(Line *line, int slot) { line->slots[line->end++ % MOST_SLOTS] = slot; }
static int pop_first(Line *line) { return line->slots[line->begin++ % MOST_SLOTS]; }
static int pop_last(Line *line) { return line->slots[--line->end % MOST_SLOTS]; }
static int is_empty(const Line *line) { return line->begin == line->end; }

static char *slot_at(const Run *run, int slot) { return run->way->slots + (uint64_t)slot * run->way->slot_nbytes; }

static int is_done(const Run *run, int slot) {
    int code = cuEventQuery(run->events[slot]);
    return code != NOT_READY && !checked(code, "cuEventQuery");
}

/* Wait a little, as ingot does: a fourth of the time that the thread has waited since `begun`. */
static void wait_since(double begun) {
    double microseconds = (now() - begun) * 1e6;
    if (microseconds < 20)
        sched_yield();
    else
        usleep((useconds_t)(microseconds < 80 ? 20 : microseconds > 4000 ? 1000 : microseconds / 4));
}

static int is_over(const Run *run) { return fault || run->error; }

/* Collect the slots whose copies are done, in the order of the copies. */
static void harvest(Run *run) {
    while (!is_empty(&run->flying) && is_done(run, run->flying.slots[run->flying.begin % MOST_SLOTS]))
        push(&run->free, pop_first(&run->flying));
}

/* Return a slot that no copy uses, or -1. Slots that take turns are all used; otherwise no more than necessary. */
static int next_slot(Run *run) {
    Way *way = run->way;
    int is_more = way->used < way->slot_count;
    if (is_more && !way->last_first) return (int)way->used++;
    if (is_empty(&run->free)) harvest(run);
    if (is_empty(&run->free)) return is_more ? (int)way->used++ : -1;
    return way->last_first ? pop_last(&run->free) : pop_first(&run->free);
}

static int lend(Run *run) {
    double begun = now();
    for (;;) {
        pthread_mutex_lock(&run->lock);
        int slot = next_slot(run);
        pthread_mutex_unlock(&run->lock);
        if (slot >= 0 || is_over(run)) return slot;
        wait_since(begun);
    }
}

static void take_back(Run *run, Line *line, int slot) {
    pthread_mutex_lock(&run->lock);
    push(line, slot);
    pthread_mutex_unlock(&run->lock);
}

/* Copy bytes by stores that leave no lines in the processor's caches. `nbytes` and `to` are multiples of 16. */
static void copy_non_temporal(char *to, const char *from, size_t nbytes) {
#ifdef __x86_64__
    for (size_t at = 0; at < nbytes; at += 16)
        _mm_stream_si128((__m128i *)(to + at), _mm_loadu_si128((const __m128i *)(from + at)));
    _mm_sfence();
#else
    memcpy(to, from, nbytes);
#endif
}

/* Return 0 or the error of a read. */
static int read_all(int file, char *to, size_t nbytes, uint64_t position) {
    while (nbytes) {
        ssize_t found = pread(file, to, nbytes, (off_t)position);
        if (found < 0 && errno == EINTR) continue;
        if (found <= 0) return found ? errno : ENODATA;
        to += found;
        position += (uint64_t)found;
        nbytes -= (size_t)found;
    }
    return 0;
}

static void fill(Run *run, char *to, uint64_t position, size_t nbytes) {
    int error = 0;
    switch (run->way->fill) {
    case READ: error = read_all(run->way->file, to, nbytes, position); break;
    case MAPPED: memcpy(to, run->map + position, nbytes); break;
    case NON_TEMPORAL: copy_non_temporal(to, run->map + position, nbytes); break;
    }
    if (error) run->error = error;
}

static void queue_copy(Run *run, int slot, uint64_t at, size_t nbytes) {
    const Way *way = run->way;
    void *stream = run->streams[at / way->chunk_nbytes % (uint64_t)way->streams];
    if (way->outward)
        DO(cuMemcpyDtoHAsync_v2, slot_at(run, slot), way->device + at, nbytes, stream);
    else
        DO(cuMemcpyHtoDAsync_v2, way->device + at, slot_at(run, slot), nbytes, stream);
    DO(cuEventRecord, run->events[slot], stream);
}

/* Bytes that a thread moves at once, and the end of the piece that it has claimed. */
typedef struct {
    uint64_t at, nbytes, end;
    int slot;
} Chunk;

static uint64_t smaller(uint64_t one, uint64_t other) { return one < other ? one : other; }

/* Set the chunk after `last`. Return false if all pieces are claimed. */
static int claim(Run *run, const Chunk *last, Chunk *next) {
    const Way *way = run->way;
    next->at = last->at + last->nbytes;
    next->end = last->end;
    if (next->at == next->end) {
        next->at = smaller(atomic_fetch_add(&run->next, 1) * way->piece_nbytes, way->nbytes);
        next->end = smaller(next->at + way->piece_nbytes, way->nbytes);
    }
    next->nbytes = smaller(next->end - next->at, way->chunk_nbytes);
    return next->nbytes > 0;
}

static void *load(void *given) {
    Run *run = given;
    Chunk chunk = {0};
    if (run->way->device) DO(cuCtxSetCurrent, context);
    while (!is_over(run) && claim(run, &chunk, &chunk)) {
        chunk.slot = lend(run);
        if (chunk.slot < 0) break;
        fill(run, slot_at(run, chunk.slot), run->way->begin + chunk.at, chunk.nbytes);
        if (run->way->device) queue_copy(run, chunk.slot, chunk.at, chunk.nbytes);
        take_back(run, run->way->device ? &run->flying : &run->free, chunk.slot);
    }
    return 0;
}

static void arrive(Run *run, const Chunk *chunk) {
    double begun = now();
    while (!is_done(run, chunk->slot) && !is_over(run)) wait_since(begun);
    memcpy(run->way->host + chunk->at, slot_at(run, chunk->slot), chunk->nbytes);
}

static void *save(void *given) {
    Run *run = given;
    const Way *way = run->way;
    const int first = atomic_fetch_add(&run->rank, 1) * way->held;
    Chunk chunks[2] = {{0}}, last = {0};
    int fetched = 0, arrived = 0;
    DO(cuCtxSetCurrent, context);
    while (!is_over(run)) {
        Chunk *next = &chunks[fetched % way->held];
        if (fetched - arrived < way->held && claim(run, &last, next)) {
            if (way->fresh && next->at % way->piece_nbytes == 0)
                madvise(way->host + next->at, next->end - next->at, POPULATE_WRITE);
            next->slot = first + fetched++ % way->held;
            queue_copy(run, next->slot, next->at, next->nbytes);
            last = *next;
        } else if (arrived < fetched)
            arrive(run, &chunks[arrived++ % way->held]);
        else
            break;
    }
    return 0;
}

static void prepare(Run *run) {
    const Way *way = run->way;
    pthread_mutex_init(&run->lock, 0);
    run->way->used = 0;
    if (way->fill == MAPPED || way->fill == NON_TEMPORAL)
        run->map = mmap(0, way->begin + way->nbytes, PROT_READ, MAP_SHARED | MAP_POPULATE, way->file, 0);
    if (run->map == MAP_FAILED) run->error = errno;
    if (!way->device) return;
    DO(cuCtxSetCurrent, context);
    for (int stream = 0; stream < way->streams; stream++) DO(cuStreamCreate, &run->streams[stream], NON_BLOCKING);
    for (uint64_t slot = 0; slot < way->slot_count; slot++) DO(cuEventCreate, &run->events[slot], WITHOUT_TIMES);
}

static void release(Run *run) {
    const Way *way = run->way;
    if (run->map && run->map != MAP_FAILED) munmap((void *)run->map, way->begin + way->nbytes);
    pthread_mutex_destroy(&run->lock);
    if (!way->device) return;
    for (uint64_t slot = 0; slot < way->slot_count; slot++) DO(cuEventDestroy_v2, run->events[slot]);
    for (int stream = 0; stream < way->streams; stream++) DO(cuStreamDestroy_v2, run->streams[stream]);
}

/* Run the threads of a way, and wait for its copies. Return the seconds, or minus the error of a read. */
static double timed(Way *way, void *(*work)(void *)) {
    Run run = {.way = way};
    pthread_t threads[MOST_THREADS];
    prepare(&run);
    double begun = now();
    for (int thread = 0; thread < way->threads; thread++) pthread_create(&threads[thread], 0, work, &run);
    for (int thread = 0; thread < way->threads; thread++) pthread_join(threads[thread], 0);
    for (int stream = 0; way->device && stream < way->streams; stream++) DO(cuStreamSynchronize, run.streams[stream]);
    double seconds = now() - begun;
    release(&run);
    return run.error ? -(double)run.error : seconds;
}

/* Move bytes from a file to slots, and to the device; or only between slots and the device. */
double probe_load(Way *way) { return timed(way, load); }

/* Move bytes from the device through slots to memory of the host. */
double probe_save(Way *way) { return timed(way, save); }
