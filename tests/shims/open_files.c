// The hard limit of open files is what OPEN_FILES says, though the kernel's own stays; and the C library has no
// close_range, as old ones have none.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

typedef int (*get_t)(__rlimit_resource_t, struct rlimit *);
typedef int (*set_t)(__rlimit_resource_t, const struct rlimit *);

int getrlimit(__rlimit_resource_t resource, struct rlimit *limit) {
    int status = ((get_t)dlsym(RTLD_NEXT, "getrlimit"))(resource, limit);
    const char *wanted = getenv("OPEN_FILES");
    if (status == 0 && resource == RLIMIT_NOFILE && wanted) {
        rlim_t most = strtoull(wanted, 0, 10);
        if (limit->rlim_cur == limit->rlim_max || limit->rlim_cur > most) limit->rlim_cur = most;
        limit->rlim_max = most;
    }
    return status;
}

int setrlimit(__rlimit_resource_t resource, const struct rlimit *limit) {
    struct rlimit real, kept = *limit;
    if (resource == RLIMIT_NOFILE && ((get_t)dlsym(RTLD_NEXT, "getrlimit"))(resource, &real) == 0) {
        if (kept.rlim_cur > real.rlim_max) kept.rlim_cur = real.rlim_max;
        kept.rlim_max = real.rlim_max;
    }
    return ((set_t)dlsym(RTLD_NEXT, "setrlimit"))(resource, &kept);
}

int getrlimit64(__rlimit_resource_t, struct rlimit64 *) __attribute__((alias("getrlimit")));
int setrlimit64(__rlimit_resource_t, const struct rlimit64 *) __attribute__((alias("setrlimit")));

long sysconf(int name) {
    struct rlimit limit;
    if (name == _SC_OPEN_MAX && getrlimit(RLIMIT_NOFILE, &limit) == 0) return (long)limit.rlim_cur;
    return ((long (*)(int))dlsym(RTLD_NEXT, "sysconf"))(name);
}

int close_range(unsigned first, unsigned last, int flags) {
    errno = ENOSYS;
    return -1;
}
