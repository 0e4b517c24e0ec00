/* Preloaded into slurmd and slurmstepd on machines whose cgroup hierarchy is hybrid: /proc/PID/cgroup then lists the
   v1 hierarchies too and Slurm's cgroup/v2 plugin refuses to start. Whoever opens that file for reading gets a copy
   with the line of cgroup v2 ("0::...") alone. Everything else is passed on as it is. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static int wanted(const char *path, int flags)
{
	return path && !(flags & (O_WRONLY | O_RDWR)) && fnmatch("/proc/*/cgroup", path, 0) == 0;
}

static int unified_only(int fd)
{
	char text[8192];
	size_t used = 0;
	ssize_t got;

	while (used < sizeof text - 1 && (got = read(fd, text + used, sizeof text - 1 - used)) > 0)
		used += got;
	text[used] = 0;
	close(fd);
	int copy = memfd_create("cgroup", MFD_CLOEXEC);
	if (copy < 0)
		return -1;
	for (char *line = text, *end; *line; line = end) {
		end = strchr(line, '\n');
		end = end ? end + 1 : line + strlen(line);
		if (strncmp(line, "0::", 3) == 0 && write(copy, line, end - line) != end - line) {
			close(copy);
			errno = EIO;
			return -1;
		}
	}
	lseek(copy, 0, SEEK_SET);
	return copy;
}

#define OPEN(name)                                                              \
	int name(const char *path, int flags, ...)                              \
	{                                                                       \
		static int (*real)(const char *, int, ...);                     \
		mode_t mode = 0;                                                \
		if (!real)                                                      \
			real = dlsym(RTLD_NEXT, #name);                         \
		if (flags & (O_CREAT | O_TMPFILE)) {                            \
			va_list arguments;                                      \
			va_start(arguments, flags);                             \
			mode = va_arg(arguments, int);                          \
			va_end(arguments);                                      \
		}                                                               \
		int fd = real(path, flags, mode);                               \
		return fd >= 0 && wanted(path, flags) ? unified_only(fd) : fd;  \
	}
OPEN(open)
OPEN(open64)

int __open_2(const char *path, int flags)
{
	return open(path, flags);
}

int __open64_2(const char *path, int flags)
{
	return open64(path, flags);
}

#define FOPEN(name)                                                             \
	FILE *name(const char *path, const char *mode)                          \
	{                                                                       \
		static FILE *(*real)(const char *, const char *);               \
		if (!real)                                                      \
			real = dlsym(RTLD_NEXT, #name);                         \
		if (mode[0] == 'r' && !strchr(mode, '+') && wanted(path, 0)) {  \
			int fd = open(path, O_RDONLY | O_CLOEXEC);              \
			return fd < 0 ? NULL : fdopen(fd, "r");                 \
		}                                                               \
		return real(path, mode);                                        \
	}
FOPEN(fopen)
FOPEN(fopen64)
