/*
 * Calls every function of libbtrfsutil in a directory and prints each result: `calls DIR`. The program is compiled
 * against the original header. Its output must be equal with each library and on each kind of mount. Numbers that
 * always differ (generations, times, UUIDs of new subvolumes) are replaced by what must hold for them.
 */
#define _GNU_SOURCE
#include <btrfsutil.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

typedef enum btrfs_util_error result_t;

static int is_user;

/* Prints a call and its result. */
static int shown(const char *call, const char *detail, int result, int code)
{
	printf("%s%s %s -> %d", is_user ? "user " : "", call, detail ? detail : "", result);
	if (result && result != BTRFS_UTIL_ERROR_STOP_ITERATION)
		printf(" %s", strerrorname_np(code) ? strerrorname_np(code) : "0");
	printf("\n");
	return result;
}
#define CALL(detail, call) (errno = 0, result = (call), shown(#call, detail, result, errno))

static int opened(const char *path)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
	if (fd < 0)
		printf("open %s: %s\n", path, strerrorname_np(errno));
	return fd;
}

static void print_uuid(const char *name, const uint8_t *uuid)
{
	printf("  %s ", name);
	for (int at = 0; at < 16; at++)
		printf("%02x", uuid[at]);
	printf("\n");
}

static int is_zero(const uint8_t *uuid)
{
	static const uint8_t zero[16];
	return !memcmp(uuid, zero, 16);
}

/* Subvolumes with these ids were there before, so the numbers of their past are printed. */
#define OLD_IDS 264

static void print_info(const struct btrfs_util_subvolume_info *info)
{
	/* Linux marks a deleted subvolume in the next commit. */
	printf("  id %lu parent %lu dir %lu flags %lx\n", info->id, info->parent_id, info->dir_id,
	       info->flags & ~(1ul << 48));
	if (info->id < OLD_IDS) {
		print_uuid("uuid", info->uuid);
		print_uuid("parent_uuid", info->parent_uuid);
		print_uuid("received_uuid", info->received_uuid);
		printf("  otransid %lu stransid %lu otime %ld.%09ld stime %ld.%09ld\n", info->otransid, info->stransid,
		       info->otime.tv_sec, info->otime.tv_nsec, info->stime.tv_sec, info->stime.tv_nsec);
	}
	printf("  uuids %d %d %d transids %d %d %d %d times %d %d %d %d\n", is_zero(info->uuid),
	       is_zero(info->parent_uuid), is_zero(info->received_uuid), info->otransid <= info->generation,
	       is_user || info->ctransid <= info->generation, info->stransid != 0,
	       info->rtransid != 0, info->otime.tv_sec != 0, info->ctime.tv_sec != 0,
	       info->stime.tv_sec != 0, info->rtime.tv_sec != 0);
}

static const char *const PATHS[] = {
	".", "dir", "dir/file", "a", "a/", "a/x", "a/y", "a/d", "a/d/..", "dir/in/b", "dir/in/deep/c", "snap",
	"link", "broken", "missing", "a/missing", "dir/file/x", "", "/proc", "/dev/null", "locked", "locked/inner",
	"hidden/sub", NULL,
};
static const uint64_t IDS[] = {0, 1, 2, 5, 6, 255, 256, 257, 258, 259, 260, 261, 262, 263, 9999, -9, -1};
#define NR_IDS (sizeof IDS / sizeof *IDS)

static void look(void)
{
	result_t result;
	char detail[64];
	char *path;
	uint64_t id;
	bool flag;
	struct btrfs_util_subvolume_info info;

	for (const char *const *at = PATHS; *at; at++) {
		CALL(*at, btrfs_util_is_subvolume(*at));
		id = 77;
		CALL(*at, btrfs_util_subvolume_id(*at, &id));
		printf("  %lu\n", id);
		path = NULL;
		if (!CALL(*at, btrfs_util_subvolume_path(*at, 0, &path)))
			printf("  '%s'\n", path);
		free(path);
		if (!CALL(*at, btrfs_util_subvolume_info(*at, 0, &info)))
			print_info(&info);
		/* The original crashes for users. */
		if (!is_user)
			CALL(*at, btrfs_util_subvolume_info(*at, 0, NULL));
		flag = false;
		CALL(*at, btrfs_util_get_subvolume_read_only(*at, &flag));
		printf("  %d\n", flag);
		id = 77;
		CALL(*at, btrfs_util_get_default_subvolume(*at, &id));
		printf("  %lu\n", id);
		int fd = opened(*at);
		CALL(*at, btrfs_util_is_subvolume_fd(fd));
		id = 77;
		CALL(*at, btrfs_util_subvolume_id_fd(fd, &id));
		printf("  %lu\n", id);
		path = NULL;
		if (!CALL(*at, btrfs_util_subvolume_path_fd(fd, 0, &path)))
			printf("  '%s'\n", path);
		free(path);
		if (!CALL(*at, btrfs_util_subvolume_info_fd(fd, 0, &info)))
			print_info(&info);
		flag = false;
		CALL(*at, btrfs_util_get_subvolume_read_only_fd(fd, &flag));
		printf("  %d\n", flag);
		id = 77;
		CALL(*at, btrfs_util_get_default_subvolume_fd(fd, &id));
		printf("  %lu\n", id);
		close(fd);
	}
	static const char *const FROM[] = {".", "a/x", "dir/in/deep/c", "dir", NULL};
	for (const char *const *at = FROM; *at; at++) {
		for (size_t nr = 0; nr < NR_IDS; nr++) {
			snprintf(detail, sizeof detail, "%s %ld", *at, (long)IDS[nr]);
			path = NULL;
			if (!CALL(detail, btrfs_util_subvolume_path(*at, IDS[nr], &path)))
				printf("  '%s'\n", path);
			free(path);
			if (!CALL(detail, btrfs_util_subvolume_info(*at, IDS[nr], &info)))
				print_info(&info);
			if (!is_user)
				CALL(detail, btrfs_util_subvolume_info(*at, IDS[nr], NULL));
		}
	}
}

/* Prints what an iterator finds. */
static void iterate(const char *at, uint64_t top, int flags, int with_info)
{
	result_t result;
	char detail[64];
	struct btrfs_util_subvolume_iterator *iterator = NULL;
	struct btrfs_util_subvolume_info info;

	snprintf(detail, sizeof detail, "%s top %ld flags %d", at, (long)top, flags);
	if (CALL(detail, btrfs_util_create_subvolume_iterator(at, top, flags, &iterator)))
		return;
	printf("  open %d\n", fcntl(btrfs_util_subvolume_iterator_fd(iterator), F_GETFD) >= 0);
	for (int nr = 0; nr < 100; nr++) {
		char *path = NULL;
		uint64_t id = 77;
		errno = 0;
		result = with_info ? btrfs_util_subvolume_iterator_next_info(iterator, &path, &info)
				   : btrfs_util_subvolume_iterator_next(iterator, &path, &id);
		if (result) {
			shown("next", "", result, errno);
			break;
		}
		printf("  '%s' %lu\n", path, with_info ? info.id : id);
		if (with_info)
			print_info(&info);
		free(path);
	}
	/* The original crashes after an error. */
	if (result == BTRFS_UTIL_ERROR_STOP_ITERATION)
		CALL("after the end", btrfs_util_subvolume_iterator_next(iterator, NULL, NULL));
	btrfs_util_destroy_subvolume_iterator(iterator);
}

static void iterators(void)
{
	static const char *const FROM[] = {
		".", "a", "a/", "dir", "a/y", "dir/file", "a/x", "dir/in", "dir/in/deep/c", "snap", "missing", "/proc",
		"hidden", "locked", NULL,
	};
	result_t result;
	struct btrfs_util_subvolume_iterator *iterator = NULL;

	for (const char *const *at = FROM; *at; at++)
		for (int flags = 0; flags < 3; flags++) {
			iterate(*at, 0, flags, 0);
			iterate(*at, 5, flags, 0);
			iterate(*at, 256, flags, flags);
		}
	for (size_t nr = 0; nr < NR_IDS; nr++)
		iterate("a", IDS[nr], 0, 1);
	int fd = opened("a");
	if (!CALL("a", btrfs_util_create_subvolume_iterator_fd(fd, 5, 1, &iterator))) {
		printf("  same fd %d\n", btrfs_util_subvolume_iterator_fd(iterator) == fd);
		CALL("first", btrfs_util_subvolume_iterator_next(iterator, NULL, NULL));
		btrfs_util_destroy_subvolume_iterator(iterator);
		printf("  open %d\n", fcntl(fd, F_GETFD));
	}
	close(fd);
	CALL("-1", btrfs_util_create_subvolume_iterator_fd(-1, 0, 0, &iterator));
	btrfs_util_destroy_subvolume_iterator(NULL);
}

static void deleted(const char *at)
{
	result_t result;
	uint64_t *ids = NULL;
	size_t nr = 77;

	/* Linux frees subvolumes in the background. */
	for (int round = 0; round < 200; round++) {
		result = btrfs_util_deleted_subvolumes(at, &ids, &nr);
		if (result || !nr)
			break;
		free(ids);
		ids = NULL;
		btrfs_util_sync(at);
		usleep(100000);
	}
	ids = NULL;
	CALL(at, btrfs_util_deleted_subvolumes(at, &ids, &nr));
	if (!result)
		for (size_t at_id = 0; at_id < nr; at_id++)
			printf("  %lu\n", ids[at_id]);
	printf("  count %zu\n", nr);
	free(ids);
}

static void syncs(void)
{
	result_t result;
	static const char *const AT[] = {".", "dir", "dir/file", "a/x", "missing", "/proc", "/dev/null", NULL};

	for (const char *const *at = AT; *at; at++) {
		uint64_t transid = 0;
		CALL(*at, btrfs_util_sync(*at));
		CALL(*at, btrfs_util_start_sync(*at, &transid));
		printf("  %d\n", transid > 0);
		CALL(*at, btrfs_util_wait_sync(*at, transid));
		CALL(*at, btrfs_util_wait_sync(*at, 0));
		CALL(*at, btrfs_util_wait_sync(*at, 1));
		CALL(*at, btrfs_util_wait_sync(*at, 1ul << 60));
		CALL(*at, btrfs_util_start_sync(*at, NULL));
		int fd = opened(*at);
		CALL(*at, btrfs_util_sync_fd(fd));
		CALL(*at, btrfs_util_start_sync_fd(fd, &transid));
		CALL(*at, btrfs_util_start_sync_fd(fd, NULL));
		CALL(*at, btrfs_util_wait_sync_fd(fd, transid));
		close(fd);
	}
	CALL("-1", btrfs_util_sync_fd(-1));
	CALL("-1", btrfs_util_start_sync_fd(-1, NULL));
	CALL("-1", btrfs_util_wait_sync_fd(-1, 0));
}

static void read_only(void)
{
	result_t result;
	bool flag;
	static const char *const AT[] = {".", "a", "dir", "dir/file", "a/d", "snap", "missing", "/proc", NULL};

	for (const char *const *at = AT; *at; at++)
		for (int round = 0; round < 4; round++) {
			CALL(*at, btrfs_util_set_subvolume_read_only(*at, round < 2));
			flag = false;
			CALL(*at, btrfs_util_get_subvolume_read_only(*at, &flag));
			printf("  %d\n", flag);
			if (round == 1)
				printf("  mkdir %s\n", mkdir("a/made", 0755) ? strerrorname_np(errno) : "works");
			rmdir("a/made");
		}
	int fd = opened("a/d");
	CALL("a/d", btrfs_util_set_subvolume_read_only_fd(fd, true));
	CALL("a/d", btrfs_util_set_subvolume_read_only_fd(fd, false));
	close(fd);
	CALL("-1", btrfs_util_set_subvolume_read_only_fd(-1, false));
	flag = false;
	CALL("-1", btrfs_util_get_subvolume_read_only_fd(-1, &flag));
}

static void defaults(void)
{
	result_t result;
	char detail[64];
	uint64_t id;
	static const char *const AT[] = {"a", "dir", "dir/in/b", "a/x", ".", "missing", "/proc", NULL};

	for (size_t nr = 0; nr < NR_IDS; nr++) {
		snprintf(detail, sizeof detail, "%ld", (long)IDS[nr]);
		CALL(detail, btrfs_util_set_default_subvolume("a", IDS[nr]));
		id = 77;
		CALL("", btrfs_util_get_default_subvolume(".", &id));
		printf("  %lu\n", id);
	}
	for (const char *const *at = AT; *at; at++) {
		CALL(*at, btrfs_util_set_default_subvolume(*at, 0));
		id = 77;
		CALL("", btrfs_util_get_default_subvolume("a", &id));
		printf("  %lu\n", id);
	}
	int fd = opened("a");
	CALL("a", btrfs_util_set_default_subvolume_fd(fd, 0));
	CALL("a", btrfs_util_get_default_subvolume_fd(fd, &id));
	printf("  %lu\n", id);
	CALL("delete the default", btrfs_util_delete_subvolume("a/d", 0));
	CALL("delete the default", btrfs_util_delete_subvolume_by_id_fd(fd, 256));
	CALL("a", btrfs_util_set_default_subvolume_fd(fd, 5));
	close(fd);
}

static char *repeated(size_t len)
{
	char *name = malloc(len + 1);
	memset(name, 'n', len);
	name[len] = 0;
	return name;
}

static void create(void)
{
	result_t result;
	uint64_t unused = 77;
	struct btrfs_util_subvolume_info info;
	static const char *const AT[] = {
		"new", "new", "new/in", "dir/made/", "dir/more///", "a/new", "missing/x", "dir/file/x", ".", "..", "/", "", "new/.",
		"new/..", "snap-ro/n", "dir", "dir/file", "link/linked", "broken", "/proc/x", "/", "//", "new//double",
		"sticky/x", "locked/x", NULL,
	};
	static const char *const NAMES[] = {"by-fd", "by-fd", "by-fd/in", "", ".", "..", "trailing/", "a", NULL};

	for (const char *const *at = AT; *at; at++) {
		CALL(*at, btrfs_util_create_subvolume(*at, 0, NULL, NULL));
		if (!result && !CALL(*at, btrfs_util_subvolume_info(*at, 0, &info)))
			print_info(&info);
	}
	CALL("flags", btrfs_util_create_subvolume("flagged", 1, NULL, NULL));
	CALL("flags", btrfs_util_create_subvolume("missing/x", 1, NULL, NULL));
	CALL("flags", btrfs_util_create_snapshot("a", "missing/x", 4, NULL, NULL));
	CALL("unused", btrfs_util_create_subvolume("unused", 0, &unused, NULL));
	printf("  %s\n", unused == 77 ? "kept" : unused == 0 ? "zero" : "set");
	for (size_t len = 250; len < 260; len++) {
		char *name = repeated(len);
		CALL("long", btrfs_util_create_subvolume(name, 0, NULL, NULL));
		free(name);
	}
	char *name = repeated(4030);
	for (size_t len = 4030; len < 4100; len += 1) {
		free(name);
		name = repeated(len);
		CALL("very long", btrfs_util_create_subvolume(name, 0, NULL, NULL));
	}
	int fd = opened("dir");
	for (const char *const *at = NAMES; *at; at++) {
		CALL(*at, btrfs_util_create_subvolume_fd(fd, *at, 0, NULL, NULL));
		CALL(*at, btrfs_util_create_subvolume_fd(fd, *at, 4, NULL, NULL));
	}
	CALL("very long", btrfs_util_create_subvolume_fd(fd, name, 0, NULL, NULL));
	free(name);
	close(fd);
	CALL("-1", btrfs_util_create_subvolume_fd(-1, "x", 0, NULL, NULL));
	fd = opened("dir/file");
	CALL("file", btrfs_util_create_subvolume_fd(fd, "x", 0, NULL, NULL));
	close(fd);
	fd = opened("/proc");
	CALL("/proc", btrfs_util_create_subvolume_fd(fd, "x", 0, NULL, NULL));
	close(fd);
}

static void write_file(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
	if (fd < 0 || write(fd, text, strlen(text)) < 0)
		printf("write %s: %s\n", path, strerrorname_np(errno));
	close(fd);
}

static void read_file(const char *path)
{
	char text[64] = "";
	int fd = open(path, O_RDONLY);
	if (fd < 0 || read(fd, text, sizeof text - 1) < 0)
		printf("  read %s: %s\n", path, strerrorname_np(errno));
	else
		printf("  read %s: '%s'\n", path, text);
	close(fd);
}

static void snapshot(void)
{
	result_t result;
	uint64_t unused = 77;
	struct btrfs_util_subvolume_info info;
	static const char *const SOURCES[] = {"a/", ".", "dir", "dir/file", "a/x", "a/d", "missing", "/proc", "link", "", NULL};
	static const char *const AT[] = {
		"s1", "s1", "dir/s2/", "a/s3", "a/d/s4", "missing/x", "dir/file/x", ".", "..", "", "dir", "/tmp/x", "/proc/x", "/",
		"link/s5", "snap-ro/n", NULL,
	};

	write_file("a/written", "just now");
	for (const char *const *at = AT; *at; at++) {
		CALL(*at, btrfs_util_create_snapshot("a", *at, 0, NULL, NULL));
		if (!result && !CALL(*at, btrfs_util_subvolume_info(*at, 0, &info)))
			print_info(&info);
	}
	read_file("s1/written");
	for (const char *const *at = SOURCES; *at; at++) {
		char name[64];
		for (int flags = 0; flags < 6; flags++) {
			snprintf(name, sizeof name, "of-%d-%d", (int)(at - SOURCES), flags);
			CALL(*at, btrfs_util_create_snapshot(*at, name, flags, NULL, NULL));
			if (!result) {
				if (!CALL(name, btrfs_util_subvolume_info(name, 0, &info)))
					print_info(&info);
				iterate(name, 0, 0, 0);
			}
		}
	}
	int fd = opened("a"), dir = opened("dir"), file = opened("a/x"), proc = opened("/proc");
	CALL("by fd", btrfs_util_create_snapshot_fd(fd, "f1", 0, NULL, NULL));
	CALL("by fd", btrfs_util_create_snapshot_fd(fd, "dir/f2/", 2, &unused, NULL));
	printf("  %s\n", unused == 77 ? "kept" : unused == 0 ? "zero" : "set");
	CALL("by fds", btrfs_util_create_snapshot_fd2(fd, dir, "g1", 0, NULL, NULL));
	CALL("by fds", btrfs_util_create_snapshot_fd2(fd, dir, "g2", 1, NULL, NULL));
	CALL("by fds", btrfs_util_create_snapshot_fd2(fd, dir, "g1", 1, NULL, NULL));
	CALL("by fds", btrfs_util_create_snapshot_fd2(fd, dir, "", 0, NULL, NULL));
	CALL("by fds", btrfs_util_create_snapshot_fd2(fd, dir, "x/y", 0, NULL, NULL));
	CALL("by fds", btrfs_util_create_snapshot_fd2(fd, dir, "g3", 3, NULL, NULL));
	CALL("by fds", btrfs_util_create_snapshot_fd2(file, dir, "g4", 0, NULL, NULL));
	CALL("by fds", btrfs_util_create_snapshot_fd2(dir, dir, "g5", 0, NULL, NULL));
	CALL("by fds", btrfs_util_create_snapshot_fd2(fd, proc, "g6", 0, NULL, NULL));
	CALL("by fds", btrfs_util_create_snapshot_fd2(proc, dir, "g7", 0, NULL, NULL));
	CALL("by fds", btrfs_util_create_snapshot_fd2(-1, dir, "g8", 0, NULL, NULL));
	CALL("by fds", btrfs_util_create_snapshot_fd2(fd, -1, "g9", 0, NULL, NULL));
	CALL("by fds", btrfs_util_create_snapshot_fd2(proc, dir, "h1", 1, NULL, NULL));
	CALL("by fds", btrfs_util_create_snapshot_fd2(file, dir, "h2", 1, NULL, NULL));
	CALL("by fds", btrfs_util_create_snapshot_fd2(fd, file, "h3", 0, NULL, NULL));
	iterate("dir/g2", 0, 0, 0);
	read_file("dir/g2/written");
	char *name = repeated(4039);
	CALL("long", btrfs_util_create_snapshot_fd2(fd, dir, name, 0, NULL, NULL));
	free(name);
	name = repeated(4040);
	CALL("long", btrfs_util_create_snapshot_fd2(fd, dir, name, 0, NULL, NULL));
	free(name);
	name = repeated(256);
	CALL("long", btrfs_util_create_snapshot_fd2(fd, dir, name, 0, NULL, NULL));
	free(name);
	close(fd);
	close(dir);
	close(file);
	close(proc);
}

static void inherit(void)
{
	result_t result;
	struct btrfs_util_qgroup_inherit *inherit = NULL;
	const uint64_t *groups;
	size_t nr;

	CALL("flags", btrfs_util_create_qgroup_inherit(1, &inherit));
	if (CALL("", btrfs_util_create_qgroup_inherit(0, &inherit)))
		return;
	btrfs_util_qgroup_inherit_get_groups(inherit, &groups, &nr);
	printf("  groups %zu\n", nr);
	CALL("empty", btrfs_util_create_subvolume("q0", 0, NULL, inherit));
	for (uint64_t group = 1; group < 20; group++)
		CALL("", btrfs_util_qgroup_inherit_add_group(&inherit, 1ul << 48 | group % 2));
	btrfs_util_qgroup_inherit_get_groups(inherit, &groups, &nr);
	for (size_t at = 0; at < nr; at++)
		printf("  group %lx\n", groups[at]);
	CALL("", btrfs_util_create_subvolume("q1", 0, NULL, inherit));
	CALL("", btrfs_util_create_snapshot("q0", "q2", 2, NULL, inherit));
	btrfs_util_destroy_qgroup_inherit(inherit);
	btrfs_util_destroy_qgroup_inherit(NULL);
	if (CALL("", btrfs_util_create_qgroup_inherit(0, &inherit)))
		return;
	CALL("", btrfs_util_qgroup_inherit_add_group(&inherit, 1ul << 48 | 1));
	CALL("one", btrfs_util_create_subvolume("q3", 0, NULL, inherit));
	CALL("one", btrfs_util_create_snapshot("q0", "q4", 0, NULL, inherit));
	CALL("one", btrfs_util_create_snapshot("a", "q6", 1, NULL, inherit));
	CALL("", btrfs_util_qgroup_inherit_add_group(&inherit, 1ul << 48 | 9));
	CALL("missing", btrfs_util_create_subvolume("q5", 0, NULL, inherit));
	btrfs_util_destroy_qgroup_inherit(inherit);
}

static void delete_all(void)
{
	result_t result;
	static const char *const AT[] = {
		"dir", "dir/file", "missing", "missing/x", "a/.", "", "/", "/proc/x", "/proc", "broken", "a", "new/double/", "dir/s2", "snap/d", "locked", "hidden", "sticky", NULL,
	};

	for (const char *const *at = AT; *at; at++)
		for (int flags = 0; flags < 3; flags++)
			if (flags != 1 || strcmp(*at, "a"))
				CALL(*at, btrfs_util_delete_subvolume(*at, flags));
	int root = opened("."), dir = opened("dir"), file = opened("dir/file"), proc = opened("/proc");
	btrfs_util_create_subvolume("dir/g1", 0, NULL, NULL);
	btrfs_util_create_subvolume("dir/g1/below", 0, NULL, NULL);
	btrfs_util_create_snapshot("a", "s1", 0, NULL, NULL);
	static const char *const NAMES[] = {"", ".", "g1", "g1", "x/y", "file", "in", "missing", "g2", NULL};
	for (const char *const *at = NAMES; *at; at++)
		for (int flags = 0; flags < 3; flags++)
			CALL(*at, btrfs_util_delete_subvolume_fd(dir, *at, flags));
	char *name = repeated(4086);
	for (size_t len = 4086; len < 4090; len++) {
		free(name);
		name = repeated(len);
		CALL("long", btrfs_util_delete_subvolume_fd(dir, name, 0));
	}
	free(name);
	CALL("file", btrfs_util_delete_subvolume_fd(file, "x", 0));
	CALL("proc", btrfs_util_delete_subvolume_fd(proc, "x", 0));
	CALL("proc", btrfs_util_delete_subvolume_fd(proc, "x", 1));
	CALL("-1", btrfs_util_delete_subvolume_fd(-1, "x", 0));
	CALL("-1", btrfs_util_delete_subvolume_fd(-1, "x", 1));
	uint64_t id = 0;
	int kept = opened("s1");
	CALL("", btrfs_util_subvolume_id("s1", &id));
	CALL("by id, with children or without", btrfs_util_delete_subvolume_by_id_fd(file, id));
	CALL("by id", btrfs_util_delete_subvolume_by_id_fd(root, id));
	CALL("by id again", btrfs_util_delete_subvolume_by_id_fd(root, id));
	struct btrfs_util_subvolume_info info;
	char *path = NULL;
	CALL("deleted", btrfs_util_is_subvolume_fd(kept));
	CALL("deleted", btrfs_util_subvolume_id_fd(kept, &id));
	CALL("deleted", btrfs_util_subvolume_path_fd(kept, 0, &path));
	CALL("deleted", btrfs_util_subvolume_info_fd(kept, 0, NULL));
	if (!CALL("deleted", btrfs_util_subvolume_info_fd(root, id, &info)))
		print_info(&info);
	CALL("deleted", btrfs_util_subvolume_path_fd(root, id, &path));
	uint64_t *ids = NULL;
	size_t nr = 0;
	CALL("one is open", btrfs_util_deleted_subvolumes_fd(root, &ids, &nr));
	int has = 0;
	for (size_t at = 0; at < nr; at++)
		has |= ids[at] == id;
	printf("  %d\n", has);
	free(ids);
	close(kept);
	for (size_t at = 0; at < NR_IDS; at++)
		if (IDS[at] != 256) {
			printf("%ld ", (long)IDS[at]);
			CALL("by id", btrfs_util_delete_subvolume_by_id_fd(root, IDS[at]));
		}
	CALL("-1", btrfs_util_delete_subvolume_by_id_fd(-1, 300));
	CALL("proc", btrfs_util_delete_subvolume_by_id_fd(proc, 300));
	close(root);
	close(dir);
	close(file);
	close(proc);
	iterate(".", 5, 1, 0);
	static const char *const LAST[] = {"link", "a/..", "..", ".", NULL};
	CALL("a recursive", btrfs_util_delete_subvolume("a", 1));
	iterate(".", 5, 0, 0);
	for (const char *const *at = LAST; *at; at++)
		for (int flags = 0; flags < 3; flags++) {
			CALL(*at, btrfs_util_delete_subvolume(*at, flags));
			iterate(".", 5, 0, 0);
		}
	deleted(".");
	deleted("dir/file");
	deleted("missing");
	deleted("/proc");
	CALL("-1", btrfs_util_deleted_subvolumes_fd(-1, &ids, &nr));
}

/* What a user may do. */
static void user_edits(void)
{
	result_t result;
	static const char *const AT[] = {"open/u1", "open/u1/below", "open/u1", "dir/u2", "open/.", "locked/u3", NULL};
	static const char *const SNAPSHOTS[][2] = {
		{"open/u1", "open/u4"}, {"a", "open/u5"}, {"open/u1", "dir/u6"}, {"locked/inner", "open/u8"},
		{"open/u1", "open/u4"}, {"open/u1", "open/u1/below/u9"},
	};
	struct btrfs_util_qgroup_inherit *inherit = NULL;
	struct btrfs_util_subvolume_info info;

	for (const char *const *at = AT; *at; at++) {
		CALL(*at, btrfs_util_create_subvolume(*at, 0, NULL, NULL));
		if (!result && !CALL(*at, btrfs_util_subvolume_info(*at, 0, &info)))
			print_info(&info);
	}
	for (size_t nr = 0; nr < sizeof SNAPSHOTS / sizeof *SNAPSHOTS; nr++)
		for (int flags = 0; flags < 4; flags += 2) {
			char name[64];
			snprintf(name, sizeof name, "%s-%d", SNAPSHOTS[nr][1], flags);
			CALL(name, btrfs_util_create_snapshot(SNAPSHOTS[nr][0], name, flags, NULL, NULL));
			if (!result && !CALL(name, btrfs_util_subvolume_info(name, 0, &info)))
				print_info(&info);
		}
	if (!btrfs_util_create_qgroup_inherit(0, &inherit)) {
		CALL("no groups", btrfs_util_create_subvolume("open/q1", 0, NULL, inherit));
		btrfs_util_destroy_qgroup_inherit(inherit);
	}
	CALL("own", btrfs_util_set_subvolume_read_only("open/u1", true));
	CALL("own", btrfs_util_set_subvolume_read_only("open/u1", false));
	CALL("own", btrfs_util_delete_subvolume("open/u1/below", 0));
	CALL("other", btrfs_util_delete_subvolume("snap", 0));
	CALL("other", btrfs_util_delete_subvolume("missing", 0));
	CALL("other", btrfs_util_delete_subvolume("dir", 0));
	int fd = opened("open");
	CALL("own", btrfs_util_delete_subvolume_fd(fd, "u1", 0));
	CALL("other", btrfs_util_delete_subvolume_by_id_fd(fd, 260));
	CALL("missing", btrfs_util_delete_subvolume_by_id_fd(fd, 9999));
	close(fd);
	iterate("open", 0, 0, 0);
	/* In post-order, the original describes another subvolume. */
	iterate(".", 0, 0, 1);
	iterate(".", 0, 1, 0);
}

static void strings(void)
{
	for (int code = -1; code < 30; code++) {
		const char *text = btrfs_util_strerror(code);
		printf("strerror %d: %s\n", code, text ? text : "(null)");
	}
}

int main(int argc, char **argv)
{
	if (argc < 2 || chdir(argv[1])) {
		perror("chdir");
		return 2;
	}
	setvbuf(stdout, NULL, _IOLBF, 0);
	strings();
	look();
	iterators();
	deleted(".");
	fflush(stdout);
	pid_t child = fork();
	if (!child) {
		if (setgroups(0, NULL) || setresgid(65534, 65534, 65534) || setresuid(65534, 65534, 65534))
			return 2;
		is_user = 1;
		look();
		iterators();
		syncs();
		read_only();
		defaults();
		deleted(".");
		user_edits();
		return 0;
	}
	int status = 1;
	waitpid(child, &status, 0);
	printf("status %d\n", status);
	syncs();
	read_only();
	defaults();
	create();
	snapshot();
	inherit();
	delete_all();
	return 0;
}
