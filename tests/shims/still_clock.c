/*
 * Preloaded, it makes the clocks that never go back stand still for as long as the file named by STILL_CLOCK says, in
 * nanoseconds: what processes of a machine that was suspended see. Waits that end at a moment of such a clock end then.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL

static long long missed(void) {
    static volatile long long *shared;
    if (!shared) {
        const char *path = getenv("STILL_CLOCK");
        int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
        void *page = file < 0 ? MAP_FAILED : mmap(NULL, sizeof *shared, PROT_READ, MAP_SHARED, file, 0);
        if (page == MAP_FAILED) _exit(97); /* a clock that goes on would look like one that slept */
        close(file);
        shared = page;
    }
    return *shared;
}

static int is_still(clockid_t id) {
    return id == CLOCK_MONOTONIC || id == CLOCK_MONOTONIC_RAW || id == CLOCK_MONOTONIC_COARSE;
}

static struct timespec moved(const struct timespec *time, long long by) {
    long long all = time->tv_sec * SECOND + time->tv_nsec + by;
    return (struct timespec){all / SECOND, all % SECOND};
}

int clock_gettime(clockid_t id, struct timespec *time) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(id, time);
    if (!failed && is_still(id)) *time = moved(time, -missed());
    return failed;
}

int sem_clockwait(sem_t *sem, clockid_t id, const struct timespec *until) {
    static int (*real)(sem_t *, clockid_t, const struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "sem_clockwait");
    struct timespec then = moved(until, is_still(id) ? missed() : 0);
    return real(sem, id, &then);
}

int pthread_cond_clockwait(pthread_cond_t *cond, pthread_mutex_t *mutex, clockid_t id, const struct timespec *until) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "pthread_cond_clockwait");
    struct timespec then = moved(until, is_still(id) ? missed() : 0);
    return real(cond, mutex, id, &then);
}
