/*
 * Calls the functions on paths of libbtrfsutil and prints each result: `paths PREFIX`. With the original library, the
 * prefix is the directory of a mount; with ours, it can also be an image and a colon. The output must be equal.
 */
#define _GNU_SOURCE
#include <btrfsutil.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *prefix;
static int result;

static int shown(const char *call, const char *detail, int code)
{
	printf("%s %s -> %d", call, detail, result);
	if (result && result != BTRFS_UTIL_ERROR_STOP_ITERATION)
		printf(" %s", strerrorname_np(code));
	printf("\n");
	return result;
}
#define CALL(detail, call) (errno = 0, result = (call), shown(#call, detail, errno))

/* Returns the path of a name below the prefix. It is never freed. */
static const char *at(const char *name)
{
	char *path;
	if (asprintf(&path, "%s/%s", prefix, name) < 0)
		exit(2);
	return path;
}

static void print_info(const struct btrfs_util_subvolume_info *info)
{
	printf("  id %lu parent %lu dir %lu flags %lx\n", info->id, info->parent_id, info->dir_id, info->flags);
	if (info->id < 264)
		printf("  %02x%02x %02x%02x %lu %ld.%09ld\n", info->uuid[0], info->uuid[15], info->parent_uuid[0],
		       info->parent_uuid[15], info->otransid, info->otime.tv_sec, info->otime.tv_nsec);
	printf("  %d %d %d\n", info->generation >= info->otransid, info->ctime.tv_sec != 0, info->otime.tv_sec != 0);
}

static void iterate(const char *name, uint64_t top, int flags, int with_info)
{
	struct btrfs_util_subvolume_iterator *iterator = NULL;
	struct btrfs_util_subvolume_info info;
	char *path;
	uint64_t id;

	if (CALL(name, btrfs_util_create_subvolume_iterator(at(name), top, flags, &iterator)))
		return;
	printf("  fd %d\n", btrfs_util_subvolume_iterator_fd(iterator) > 2);
	for (;;) {
		if (with_info ? btrfs_util_subvolume_iterator_next_info(iterator, &path, &info)
			      : btrfs_util_subvolume_iterator_next(iterator, &path, &id))
			break;
		printf("  '%s' %lu\n", path, with_info ? info.id : id);
		if (with_info)
			print_info(&info);
		free(path);
	}
	btrfs_util_destroy_subvolume_iterator(iterator);
}

static void look(const char *name)
{
	struct btrfs_util_subvolume_info info;
	uint64_t id = 77;
	char *path = NULL;
	bool flag = false;

	CALL(name, btrfs_util_is_subvolume(at(name)));
	CALL(name, btrfs_util_subvolume_id(at(name), &id));
	printf("  %lu\n", id);
	if (!CALL(name, btrfs_util_subvolume_path(at(name), 0, &path)))
		printf("  '%s'\n", path);
	free(path);
	if (!CALL(name, btrfs_util_subvolume_info(at(name), 0, &info)))
		print_info(&info);
	CALL(name, btrfs_util_get_subvolume_read_only(at(name), &flag));
	printf("  %d\n", flag);
	id = 77;
	CALL(name, btrfs_util_get_default_subvolume(at(name), &id));
	printf("  %lu\n", id);
}

int main(int argc, char **argv)
{
	static const char *const NAMES[] = {
		"", "a", "a/", "a/x", "a/y", "a/d", "dir", "dir/file", "dir/in/b", "snap", "snap-ro", "link", "missing",
		"a/missing", "dir/file/x", NULL,
	};
	static const uint64_t IDS[] = {1, 5, 6, 256, 258, 259, 263, 9999, -9};
	struct btrfs_util_qgroup_inherit *inherit = NULL;
	uint64_t transid = 0, id = 0;
	char *path;

	if (argc < 2)
		return 2;
	prefix = argv[1];
	setvbuf(stdout, NULL, _IOLBF, 0);
	for (const char *const *name = NAMES; *name; name++)
		look(*name);
	for (size_t nr = 0; nr < sizeof IDS / sizeof *IDS; nr++) {
		struct btrfs_util_subvolume_info info;
		printf("%ld\n", (long)IDS[nr]);
		if (!CALL("a/x", btrfs_util_subvolume_path(at("a/x"), IDS[nr], &path))) {
			printf("  '%s'\n", path);
			free(path);
		}
		if (!CALL("a/x", btrfs_util_subvolume_info(at("a/x"), IDS[nr], &info)))
			print_info(&info);
	}
	for (int flags = 0; flags < 3; flags++) {
		iterate("", 0, flags, 0);
		iterate("a", 0, flags, 1);
		iterate("a", 5, flags, 0);
		iterate("dir", 0, flags, 0);
		iterate("dir", 256, flags, 0);
		iterate("missing", 0, flags, 0);
		iterate("", 9999, flags, 0);
	}
	CALL("", btrfs_util_sync(at("")));
	CALL("", btrfs_util_start_sync(at("a"), &transid));
	printf("  %d\n", transid > 0);
	CALL("", btrfs_util_wait_sync(at("a"), transid));
	CALL("", btrfs_util_wait_sync(at("a"), 0));
	CALL("", btrfs_util_wait_sync(at("a"), 1ul << 60));
	CALL("", btrfs_util_sync(at("missing")));
	for (int read_only = 1; read_only >= 0; read_only--) {
		bool flag = false;
		CALL("", btrfs_util_set_subvolume_read_only(at("a"), read_only));
		CALL("", btrfs_util_get_subvolume_read_only(at("a"), &flag));
		printf("  %d\n", flag);
		CALL("", btrfs_util_set_subvolume_read_only(at("dir"), read_only));
	}
	CALL("", btrfs_util_set_default_subvolume(at("a"), 0));
	CALL("", btrfs_util_get_default_subvolume(at("dir"), &id));
	printf("  %lu\n", id);
	CALL("", btrfs_util_delete_subvolume(at("a/d"), 2));
	CALL("", btrfs_util_delete_subvolume(at("a"), 0));
	CALL("", btrfs_util_set_default_subvolume(at("dir"), 0));
	CALL("", btrfs_util_set_default_subvolume(at("dir"), 9999));
	CALL("", btrfs_util_set_default_subvolume(at("dir"), 5));
	CALL("", btrfs_util_create_subvolume(at("new"), 0, NULL, NULL));
	CALL("", btrfs_util_create_subvolume(at("new/in/"), 0, NULL, NULL));
	CALL("", btrfs_util_create_subvolume(at("new"), 0, NULL, NULL));
	CALL("", btrfs_util_create_subvolume(at("bad"), 1, NULL, NULL));
	CALL("", btrfs_util_create_subvolume(at("missing/x"), 0, NULL, NULL));
	CALL("", btrfs_util_create_subvolume(at("dir/file/x"), 0, NULL, NULL));
	CALL("", btrfs_util_create_subvolume(at("snap-ro/n"), 0, NULL, NULL));
	CALL("", btrfs_util_create_qgroup_inherit(0, &inherit));
	CALL("", btrfs_util_qgroup_inherit_add_group(&inherit, 1ul << 48));
	CALL("", btrfs_util_create_subvolume(at("joined"), 0, NULL, inherit));
	CALL("", btrfs_util_create_snapshot(at("a"), at("s1"), 0, NULL, NULL));
	CALL("", btrfs_util_create_snapshot(at("a"), at("s2"), 2, NULL, inherit));
	CALL("", btrfs_util_create_snapshot(at("a"), at("s3"), 1, NULL, NULL));
	CALL("", btrfs_util_create_snapshot(at("a"), at("s4"), 3, NULL, NULL));
	CALL("", btrfs_util_create_snapshot(at("a"), at("s1"), 0, NULL, NULL));
	CALL("", btrfs_util_create_snapshot(at("dir"), at("s5"), 0, NULL, NULL));
	CALL("", btrfs_util_create_snapshot(at("missing"), at("s5"), 0, NULL, NULL));
	CALL("", btrfs_util_create_snapshot(at("a"), at("missing/s5"), 0, NULL, NULL));
	btrfs_util_destroy_qgroup_inherit(inherit);
	for (const char *const *name = (const char *const[]){"new", "joined", "s1", "s2", "s3", "s3/d", NULL}; *name; name++)
		look(*name);
	iterate("", 5, 0, 1);
	CALL("", btrfs_util_delete_subvolume(at("s3"), 0));
	CALL("", btrfs_util_delete_subvolume(at("s3"), 1));
	CALL("", btrfs_util_delete_subvolume(at("new/in"), 0));
	CALL("", btrfs_util_delete_subvolume(at("new/in"), 0));
	CALL("", btrfs_util_delete_subvolume(at("dir"), 0));
	CALL("", btrfs_util_delete_subvolume(at("dir"), 1));
	CALL("", btrfs_util_delete_subvolume(at("dir/file"), 0));
	CALL("", btrfs_util_delete_subvolume(at("missing"), 1));
	CALL("", btrfs_util_delete_subvolume(at("missing/x"), 1));
	iterate("", 5, 1, 0);
	return 0;
}
