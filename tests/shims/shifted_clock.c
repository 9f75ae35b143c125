/* Preloaded, it shows a program a wall clock that is ahead by SHIFTED_CLOCK seconds; all other clocks stay true. */

#define _GNU_SOURCE
#include <semaphore.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static time_t shift(void) {
    const char *text = getenv("SHIFTED_CLOCK");
    return text ? (time_t)atol(text) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += shift();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone;
    int failed = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return failed;
}

time_t time(time_t *out) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (out) *out = exact.tv_sec;
    return exact.tv_sec;
}

/* A deadline on the wall clock was computed with the shifted one; the kernel goes by its own. */
int sem_timedwait(sem_t *restrict sem, const struct timespec *restrict until) {
    struct timespec mine = *until;
    mine.tv_sec -= shift();
    return sem_clockwait(sem, CLOCK_REALTIME, &mine);
}
