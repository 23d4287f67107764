/*
 * ubtrfs: btrfs filesystems in the program's own process, in image files, block devices or memory, without the kernel's
 * btrfs. Made of crates/capi/src/exports; do not edit. The guide is docs/guide/c.md.
 *
 * Results. A function that can fail returns 0 or a negative errno. Then, if its last argument is not null, *error is an
 * error with a message, which the program frees with ubtrfs_error_free. On success *error is null. Other results are
 * written on success only; handles and memory are null after a failure.
 *
 * Handles. A handle is a number in the shape of a pointer; it is no address. A null pointer fails with EINVAL. A closed
 * handle, or a handle of another kind, fails with EBADF.
 *
 * Pointers. A pointer that is not null points to as many bytes as the function says. The library keeps no pointer after
 * the call, apart from functions and user pointers of devices. A text ends with a zero byte. A path has any bytes, starts
 * at the opened subvolume, and does not lead out of it.
 *
 * Threads. Every function may be called by any thread at any time, also with handles that other threads use or close: a
 * call that runs finishes first. Two things are valid only until another call: the entry of a directory until the next
 * call for the directory, and the texts of an error until it is freed. So a thread that shares a directory or an error
 * does not use them while another thread makes such a call. A handle belongs to the process that got it: in a process
 * that is forked from it, every function fails with EINVAL.
 *
 * A filesystem that is not closed is not committed when the program ends: call ubtrfs_close.
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#ifndef UBTRFS_H
#define UBTRFS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---------------------------------------------------------------------------------------------
 * Handles
 */

/** Why a function failed. Free it with ubtrfs_error_free. */
typedef struct ubtrfs_error ubtrfs_error;

/** A device: storage of fixed size for a filesystem. */
typedef struct ubtrfs_device ubtrfs_device;

/** An open filesystem. */
typedef struct ubtrfs_fs ubtrfs_fs;

/** An open file. It has a position, which ubtrfs_file_read, ubtrfs_file_write and ubtrfs_file_seek use. */
typedef struct ubtrfs_file ubtrfs_file;

/** An open directory. */
typedef struct ubtrfs_dir ubtrfs_dir;

/** A job: shows how far a long operation is, pauses and cancels it, from another thread. Use a job for one operation. */
typedef struct ubtrfs_job ubtrfs_job;

/* ---------------------------------------------------------------------------------------------
 * Errors, memory, version
 */

/** The operation failed for the reason that the number and the message tell. */
#define UBTRFS_ERROR_FAILED 1u

/** The content of a device contradicts the format of btrfs. The message names the place. */
#define UBTRFS_ERROR_CORRUPTION 2u

/** The program broke a rule of this interface: a null pointer, a closed handle, an invalid value. */
#define UBTRFS_ERROR_USAGE 3u

/** The library has a bug. The filesystem is read-only from then on. */
#define UBTRFS_ERROR_PANIC 4u

/** The number of the error, such as ENOENT. It is positive, and 0 for a null pointer or an unknown error. */
int ubtrfs_error_errno(ubtrfs_error *error);

/** The kind of the error, one of UBTRFS_ERROR_.... It is 0 for a null pointer or an unknown error. */
uint32_t ubtrfs_error_kind(ubtrfs_error *error);

/** The message: one line with the operation, the path and the reason. It is never null, and valid until the error is freed. */
const char *ubtrfs_error_message(ubtrfs_error *error);

/**
 * The failed operation as a verb, such as "open"; empty if the failure has none. It is never null, and valid until the
 * error is freed.
 */
const char *ubtrfs_error_operation(ubtrfs_error *error);

/** The path of the failed operation; empty if the failure has none. It is never null, and valid until the error is freed. */
const char *ubtrfs_error_path(ubtrfs_error *error);

/** Frees an error. A null pointer is ignored. Returns -EBADF for an error that was freed before. */
int ubtrfs_error_free(ubtrfs_error *error);

/**
 * Frees memory that a function of this library made: texts, contents, lists. A null pointer is ignored. Returns -EINVAL
 * for other memory, and for memory that was freed before.
 */
int ubtrfs_free(void *memory);

/** The version of the library, such as "0.1.0". */
const char *ubtrfs_version(void);

/* ---------------------------------------------------------------------------------------------
 * Devices: storage of the program, files, memory
 *
 * The engine calls the functions of a device from several threads at the same time, and until the device is released.
 * A function of a device must not call this library on a filesystem that uses the device.
 */

/** Fills data with len bytes from offset. Returns 0, or a negative errno. */
typedef int (*ubtrfs_read_at_fn)(void *user, void *data, size_t len, uint64_t offset);

/** Writes len bytes at offset. Returns 0, or a negative errno. */
typedef int (*ubtrfs_write_at_fn)(void *user, const void *data, size_t len, uint64_t offset);

/** Makes all completed writes durable. Returns 0, or a negative errno. */
typedef int (*ubtrfs_flush_fn)(void *user);

/** Learns that the content of a range is not needed any more. Returns 0, or a negative errno. */
typedef int (*ubtrfs_discard_fn)(void *user, uint64_t offset, uint64_t len);

/** Learns that a device is not used any more. It is called once, by any thread, and user may be freed in it. */
typedef void (*ubtrfs_release_fn)(void *user);

/** The device refuses writes. */
#define UBTRFS_DEVICE_READ_ONLY 1u

/** A device of the program. Begin with UBTRFS_DEVICE_OPTIONS_INIT. */
typedef struct ubtrfs_device_options {
  /** The size of this struct. */
  size_t struct_size;
  /** The size of the device in bytes. */
  uint64_t size_bytes;
  /** UBTRFS_DEVICE_..., or 0. */
  uint32_t flags;
  /** Not used: 0. */
  uint32_t reserved;
  /** The name in messages; or null. */
  const char *name;
  /** The first argument of the functions. */
  void *user;
  /** Reads bytes. A range is always inside of the device. */
  ubtrfs_read_at_fn read_at;
  /** Writes bytes; may be null for a device that refuses writes. */
  ubtrfs_write_at_fn write_at;
  /** Makes writes durable; may be null for a device that refuses writes. */
  ubtrfs_flush_fn flush;
  /** Discards a range; or null. */
  ubtrfs_discard_fn discard;
  /** Releases user; or null. */
  ubtrfs_release_fn release;
} ubtrfs_device_options;
#define UBTRFS_DEVICE_OPTIONS_INIT {sizeof(ubtrfs_device_options), 0, 0, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL}

/**
 * Makes a device of functions of the program. Its release is called when the handle is closed, and the filesystems on
 * the device, their files and directories are closed, too. If this function fails, release is not called.
 */
int ubtrfs_device_new(const ubtrfs_device_options *options, ubtrfs_device **device, ubtrfs_error **error);

/** Makes a device in memory. size is in bytes. Memory is allocated as the device is written to. */
int ubtrfs_device_in_memory(uint64_t size, ubtrfs_device **device, ubtrfs_error **error);

/** Opens an image file or a block device as a device. flags is UBTRFS_DEVICE_READ_ONLY or 0. */
int ubtrfs_device_open(const char *path, uint32_t flags, ubtrfs_device **device, ubtrfs_error **error);

/** Makes a new, sparse image file of size bytes, and opens it as a device. */
int ubtrfs_device_create(const char *path, uint64_t size, ubtrfs_device **device, ubtrfs_error **error);

/** Returns the size of a device in bytes. */
int ubtrfs_device_size(ubtrfs_device *device, uint64_t *size, ubtrfs_error **error);

/** Closes the handle of a device. Filesystems that use the device keep it open. */
int ubtrfs_device_close(ubtrfs_device *device, ubtrfs_error **error);

/* ---------------------------------------------------------------------------------------------
 * Filesystems: making, opening, space, closing
 */

/** Opens for reading only. */
#define UBTRFS_OPEN_READ_ONLY 1u

/** How a filesystem is opened. Begin with UBTRFS_OPEN_OPTIONS_INIT. */
typedef struct ubtrfs_open_options {
  /** The size of this struct. */
  size_t struct_size;
  /** UBTRFS_OPEN_..., or 0. */
  uint32_t flags;
  /** The number of devices. */
  uint32_t nr_devices;
  /** Mount options of btrfs, separated by commas, such as "compress=zstd:3,noatime"; or null. */
  const char *mount_options;
  /** The subvolume to open, as a path from the top level; null for the default subvolume. */
  const char *subvolume;
  /** More devices of the filesystem; or null. Devices beside the first one and in /dev are found without it. */
  const char *const *devices;
  /** Bytes of memory for caches and data that is not written yet; 0 for the usual amount. */
  uint64_t memory_bytes;
} ubtrfs_open_options;
#define UBTRFS_OPEN_OPTIONS_INIT {sizeof(ubtrfs_open_options), 0, 0, NULL, NULL, NULL, 0}

/** Overwrites what the devices contain. */
#define UBTRFS_MKFS_FORCE 1u

/** Data and metadata share block groups, for small filesystems. */
#define UBTRFS_MKFS_MIXED 2u

/** Puts the block group items into a tree of their own. */
#define UBTRFS_MKFS_BLOCK_GROUP_TREE 4u

/** Does not discard the devices first. */
#define UBTRFS_MKFS_NO_DISCARD 8u

/** Uses seconds and nanoseconds as the time of creation. */
#define UBTRFS_MKFS_TIME 16u

/** Options of a new filesystem. Begin with UBTRFS_MKFS_OPTIONS_INIT. */
typedef struct ubtrfs_mkfs_options {
  /** The size of this struct. */
  size_t struct_size;
  /** UBTRFS_MKFS_..., or 0. */
  uint32_t flags;
  /** Bytes of a tree block; 0 for 16384. */
  uint32_t nodesize;
  /** Bytes of a sector; 0 for 4096. */
  uint32_t sectorsize;
  /** The owner of the root directory. */
  uint32_t root_uid;
  /** The group of the root directory. */
  uint32_t root_gid;
  /** The nanoseconds of the time of creation. */
  uint32_t nanoseconds;
  /** The seconds of the time of creation since 1970. */
  int64_t seconds;
  /** The label, at most 255 bytes; or null. */
  const char *label;
  /** The UUID, in the usual form with 36 characters; null for a random one. */
  const char *uuid;
  /** The algorithm of checksums: "crc32c", "xxhash", "sha256" or "blake2"; null for "crc32c". */
  const char *csum;
  /** The profile of data: "single", "dup", "raid0", "raid1", "raid1c3", "raid1c4" or "raid10"; null for the usual one. */
  const char *data_profile;
  /** The profile of metadata; null for the usual one. */
  const char *metadata_profile;
} ubtrfs_mkfs_options;
#define UBTRFS_MKFS_OPTIONS_INIT {sizeof(ubtrfs_mkfs_options), 0, 0, 0, 0, 0, 0, 0, NULL, NULL, NULL, NULL, NULL}

/** The space of a filesystem in bytes, as df shows it. */
typedef struct ubtrfs_space_usage {
  /** The size of the devices, divided by the number of copies of data. */
  uint64_t total_bytes;
  /** Free bytes. */
  uint64_t free_bytes;
  /** Bytes that are available for data. */
  uint64_t available_bytes;
} ubtrfs_space_usage;

/**
 * Opens an image file, a block device, or an export of an NBD server. options may be null. Close the filesystem with
 * ubtrfs_close.
 */
int ubtrfs_open(const char *path, const ubtrfs_open_options *options, ubtrfs_fs **fs, ubtrfs_error **error);

/**
 * Opens the filesystem on devices of the program: all devices of one filesystem. options may be null. The handles of
 * the devices may be closed afterwards. If all devices refuse writes, the filesystem is read-only.
 */
int ubtrfs_open_devices(ubtrfs_device *const *devices, size_t nr_devices, const ubtrfs_open_options *options, ubtrfs_fs **fs, ubtrfs_error **error);

/**
 * Makes a filesystem and opens it. With a size in bytes, path is the name of a new, sparse image file. With the size
 * 0, it names an existing image file or block device, whose content is lost if UBTRFS_MKFS_FORCE is set. The options
 * may be null. Close the filesystem with ubtrfs_close.
 */
int ubtrfs_make(const char *path, uint64_t size, const ubtrfs_mkfs_options *options, const ubtrfs_open_options *open_options, ubtrfs_fs **fs, ubtrfs_error **error);

/**
 * Makes a filesystem in memory, which disappears when it is closed. size is in bytes. Memory is allocated as the
 * filesystem is written to.
 */
int ubtrfs_make_in_memory(uint64_t size, ubtrfs_fs **fs, ubtrfs_error **error);

/** Makes a filesystem on devices of the program, without opening it. options may be null. */
int ubtrfs_make_devices(ubtrfs_device *const *devices, size_t nr_devices, const ubtrfs_mkfs_options *options, ubtrfs_error **error);

/**
 * Makes another handle of the filesystem, whose new files belong to a user and a group. The bits of umask are removed
 * from their permissions. Close the handle with ubtrfs_fs_release.
 */
int ubtrfs_with_owner(ubtrfs_fs *fs, uint32_t uid, uint32_t gid, uint32_t umask, ubtrfs_fs **other, ubtrfs_error **error);

/** Makes all changes so far durable. */
int ubtrfs_sync(ubtrfs_fs *fs, ubtrfs_error **error);

/**
 * Makes all changes durable, and closes the filesystem. The handle is closed also if the function fails. Then the devices
 * may lack the changes since the last commit. Later changes through other handles of the filesystem, and through its
 * open files, fail.
 */
int ubtrfs_close(ubtrfs_fs *fs, ubtrfs_error **error);

/** Closes a handle of ubtrfs_with_owner. The filesystem stays open as long as it has another handle. */
int ubtrfs_fs_release(ubtrfs_fs *fs, ubtrfs_error **error);

/** Returns the total, free and available space. */
int ubtrfs_usage(ubtrfs_fs *fs, ubtrfs_space_usage *usage, ubtrfs_error **error);

/** Returns the label, which is empty if the filesystem has none. Free it with ubtrfs_free. */
int ubtrfs_label(ubtrfs_fs *fs, char **label, ubtrfs_error **error);

/** Returns why the filesystem is read-only, or a null pointer if it is not. Free the text with ubtrfs_free. */
int ubtrfs_read_only_reason(ubtrfs_fs *fs, char **reason, ubtrfs_error **error);

/**
 * Begins a transaction: the changes until ubtrfs_commit, of all threads, become durable together. In it, ubtrfs_sync
 * and ubtrfs_file_sync fail, and so do new subvolumes, snapshots, and a second transaction. If the program ends before
 * the commit, the devices keep the state before the transaction.
 */
int ubtrfs_begin(ubtrfs_fs *fs, ubtrfs_error **error);

/** Ends the transaction. Its changes are durable on return. Fails with EINVAL if none runs. */
int ubtrfs_commit(ubtrfs_fs *fs, ubtrfs_error **error);

/**
 * Gives up the changes of the transaction, of all threads. The filesystem cannot be changed afterwards: close it, which
 * fails, and open it again. If nothing was changed, it goes on. Fails with EINVAL if no transaction runs.
 */
int ubtrfs_abort(ubtrfs_fs *fs, ubtrfs_error **error);

/* ---------------------------------------------------------------------------------------------
 * Attributes: owner, permissions, times, extended attributes
 */

/** The kind of file is invalid on disk. */
#define UBTRFS_KIND_INVALID 0u

/** A FIFO. */
#define UBTRFS_KIND_FIFO 1u

/** A character device. */
#define UBTRFS_KIND_CHAR_DEVICE 2u

/** A directory, or a subvolume. */
#define UBTRFS_KIND_DIRECTORY 4u

/** A block device. */
#define UBTRFS_KIND_BLOCK_DEVICE 6u

/** A regular file. */
#define UBTRFS_KIND_FILE 8u

/** A symbolic link. */
#define UBTRFS_KIND_SYMLINK 10u

/** A socket. */
#define UBTRFS_KIND_SOCKET 12u

/** A symbolic link at the end of the path is not followed. */
#define UBTRFS_NOFOLLOW 1u

/** As a user or group: it stays. */
#define UBTRFS_UNCHANGED 0xffffffffu

/** A time: seconds since 1970, negative before, plus nanoseconds. */
typedef struct ubtrfs_time {
  /** The seconds. */
  int64_t seconds;
  /** The nanoseconds, below 1000000000. */
  uint32_t nanoseconds;
  /** 1 if this is a time. 0 if the time on disk cannot be represented, or shall not change. */
  uint32_t is_set;
} ubtrfs_time;

/** The attributes of a file. */
typedef struct ubtrfs_metadata {
  /** The inode number, which is unique in its subvolume only. */
  uint64_t ino;
  /** The id of the file's subvolume. */
  uint64_t subvolume_id;
  /** The size in bytes. */
  uint64_t size;
  /** The space that the file occupies, in units of 512 bytes. */
  uint64_t blocks;
  /** The permissions and the bits of the kind of file, as st_mode of stat(2). */
  uint32_t mode;
  /** The kind of file: UBTRFS_KIND_.... */
  uint32_t kind;
  /** The number of names; 1 for every directory. */
  uint32_t nlink;
  /** The owner. */
  uint32_t uid;
  /** The group. */
  uint32_t gid;
  /** The major number of a device file. */
  uint32_t device_major;
  /** The minor number of a device file. */
  uint32_t device_minor;
  /** Not used: 0. */
  uint32_t reserved;
  /** The time of the last access. */
  ubtrfs_time accessed;
  /** The time of the last change of the content. */
  ubtrfs_time modified;
  /** The time of the last change of the attributes. */
  ubtrfs_time changed;
  /** The time of creation. */
  ubtrfs_time created;
  /** Not used: 0. */
  uint64_t more[8];
} ubtrfs_metadata;

/** Times to set. Begin with UBTRFS_TIMES_INIT. A time stays if its is_set is 0. */
typedef struct ubtrfs_times {
  /** The size of this struct. */
  size_t struct_size;
  /** The time of the last access. */
  ubtrfs_time accessed;
  /** The time of the last change of the content. */
  ubtrfs_time modified;
  /** The time of creation, which Linux cannot change. */
  ubtrfs_time created;
} ubtrfs_times;
#define UBTRFS_TIMES_INIT {sizeof(ubtrfs_times), {0, 0, 0}, {0, 0, 0}, {0, 0, 0}}

/** Returns the attributes of a file. Symbolic links are followed. */
int ubtrfs_stat(ubtrfs_fs *fs, const char *path, ubtrfs_metadata *metadata, ubtrfs_error **error);

/** Returns the attributes of a file. A symbolic link at the end of the path is not followed. */
int ubtrfs_lstat(ubtrfs_fs *fs, const char *path, ubtrfs_metadata *metadata, ubtrfs_error **error);

/** Sets the permissions of a file: 12 bits. Symbolic links are followed. */
int ubtrfs_chmod(ubtrfs_fs *fs, const char *path, uint32_t mode, ubtrfs_error **error);

/**
 * Sets the owner and the group of a file. UBTRFS_UNCHANGED leaves one of them. flags is UBTRFS_NOFOLLOW or 0. As on
 * Linux, this can clear the set-user-id and set-group-id bits, so set permissions afterwards.
 */
int ubtrfs_chown(ubtrfs_fs *fs, const char *path, uint32_t uid, uint32_t gid, uint32_t flags, ubtrfs_error **error);

/** Sets times of a file. flags is UBTRFS_NOFOLLOW or 0. */
int ubtrfs_utimes(ubtrfs_fs *fs, const char *path, const ubtrfs_times *times, uint32_t flags, ubtrfs_error **error);

/**
 * Returns the value of an extended attribute, such as "user.comment". Fails with ENODATA if it does not exist. A symbolic
 * link at the end of the path is not followed. Free value with ubtrfs_free. A zero byte follows the len bytes.
 */
int ubtrfs_getxattr(ubtrfs_fs *fs, const char *path, const char *name, void **value, size_t *len, ubtrfs_error **error);

/**
 * Returns the names of all extended attributes. A zero byte ends each name, and len is the length of all names with
 * their zero bytes. A symbolic link at the end of the path is not followed. Free names with ubtrfs_free.
 */
int ubtrfs_listxattr(ubtrfs_fs *fs, const char *path, char **names, size_t *len, ubtrfs_error **error);

/** Sets an extended attribute, or replaces its value. A symbolic link at the end of the path is not followed. */
int ubtrfs_setxattr(ubtrfs_fs *fs, const char *path, const char *name, const void *value, size_t len, ubtrfs_error **error);

/**
 * Removes an extended attribute. Fails with ENODATA if it does not exist. A symbolic link at the end of the path is not
 * followed.
 */
int ubtrfs_removexattr(ubtrfs_fs *fs, const char *path, const char *name, ubtrfs_error **error);

/* ---------------------------------------------------------------------------------------------
 * Names: directories, links, removal
 */

/** Makes a directory with the permissions 0777 without the umask of the handle, and 0755 for a handle without one. */
int ubtrfs_mkdir(ubtrfs_fs *fs, const char *path, ubtrfs_error **error);

/** Makes a directory and its missing parents. Succeeds if the directory exists. */
int ubtrfs_mkdir_all(ubtrfs_fs *fs, const char *path, ubtrfs_error **error);

/** Renames a file or directory, and replaces an existing to, like rename(2). */
int ubtrfs_rename(ubtrfs_fs *fs, const char *from, const char *to, ubtrfs_error **error);

/** Removes a name that is not a directory. The content of an open file remains until the file is closed. */
int ubtrfs_unlink(ubtrfs_fs *fs, const char *path, ubtrfs_error **error);

/** Removes an empty directory. */
int ubtrfs_rmdir(ubtrfs_fs *fs, const char *path, ubtrfs_error **error);

/** Removes a directory with its content. Symbolic links are not followed. A subvolume with files in it is an error. */
int ubtrfs_remove_all(ubtrfs_fs *fs, const char *path, ubtrfs_error **error);

/** Makes another name for a file. */
int ubtrfs_link(ubtrfs_fs *fs, const char *original, const char *link, ubtrfs_error **error);

/** Makes a symbolic link to target, which can be any path. */
int ubtrfs_symlink(ubtrfs_fs *fs, const char *target, const char *link, ubtrfs_error **error);

/**
 * Makes a FIFO, a socket or a device file. mode has the type (S_IFIFO, S_IFSOCK, S_IFCHR or S_IFBLK of
 * sys/stat.h) and the permissions. major and minor are the number of a device file.
 */
int ubtrfs_mknod(ubtrfs_fs *fs, const char *path, uint32_t mode, uint32_t major, uint32_t minor, ubtrfs_error **error);

/** Returns the target of a symbolic link. Free it with ubtrfs_free. */
int ubtrfs_readlink(ubtrfs_fs *fs, const char *path, char **target, ubtrfs_error **error);

/** Writes 1 into exists if the path exists, otherwise 0. Symbolic links are followed. */
int ubtrfs_exists(ubtrfs_fs *fs, const char *path, int *exists, ubtrfs_error **error);

/* ---------------------------------------------------------------------------------------------
 * Files: content
 */

/** Allows reading. */
#define UBTRFS_READ 1u

/** Allows writing. */
#define UBTRFS_WRITE 2u

/** Allows writing at the end of the file. Appends of several threads do not overwrite each other. */
#define UBTRFS_APPEND 4u

/** Makes the file if it does not exist. Needs UBTRFS_WRITE or UBTRFS_APPEND. */
#define UBTRFS_CREATE 8u

/** Makes the file, and fails with EEXIST if the name exists. Needs UBTRFS_WRITE or UBTRFS_APPEND. */
#define UBTRFS_EXCLUSIVE 16u

/** Truncates the file to length 0. Needs UBTRFS_WRITE or UBTRFS_APPEND. */
#define UBTRFS_TRUNCATE 32u

/** As the mode of a new file: 0666 without the umask of the handle, and 0644 for a handle without one. */
#define UBTRFS_DEFAULT_MODE 0xffffffffu

/** offset counts from the begin of the file. */
#define UBTRFS_SEEK_SET 0u

/** offset counts from the position. */
#define UBTRFS_SEEK_CUR 1u

/** offset counts from the end of the file. */
#define UBTRFS_SEEK_END 2u

/**
 * Opens a regular file. flags are UBTRFS_READ and others. mode has the permissions of a new file, or is
 * UBTRFS_DEFAULT_MODE. Symbolic links are followed. Close the file with ubtrfs_file_close.
 */
int ubtrfs_file_open(ubtrfs_fs *fs, const char *path, uint32_t flags, uint32_t mode, ubtrfs_file **file, ubtrfs_error **error);

/**
 * Reads at most len bytes at offset. nr_read gets their number, which is less than len only at the end of the
 * file. The position stays.
 */
int ubtrfs_file_pread(ubtrfs_file *file, void *data, size_t len, uint64_t offset, size_t *nr_read, ubtrfs_error **error);

/**
 * Reads at most len bytes at the position, and moves it. nr_read gets their number, which is less than len only at
 * the end of the file.
 */
int ubtrfs_file_read(ubtrfs_file *file, void *data, size_t len, size_t *nr_read, ubtrfs_error **error);

/** Writes all len bytes at offset. The position stays. After a failure, a part may be written. */
int ubtrfs_file_pwrite(ubtrfs_file *file, const void *data, size_t len, uint64_t offset, ubtrfs_error **error);

/**
 * Writes all len bytes at the position, and moves it. With UBTRFS_APPEND, writes at the end of the file. After a
 * failure, a part may be written.
 */
int ubtrfs_file_write(ubtrfs_file *file, const void *data, size_t len, ubtrfs_error **error);

/**
 * Moves the position. whence is UBTRFS_SEEK_SET or another UBTRFS_SEEK_.... position gets the new position, and
 * may be null.
 */
int ubtrfs_file_seek(ubtrfs_file *file, int64_t offset, uint32_t whence, uint64_t *position, ubtrfs_error **error);

/** Finds the next range with data at or after offset. Without one, start and end get the size of the file. */
int ubtrfs_file_next_data(ubtrfs_file *file, uint64_t offset, uint64_t *start, uint64_t *end, ubtrfs_error **error);

/** Truncates the file to size bytes, or extends it by a hole. */
int ubtrfs_file_truncate(ubtrfs_file *file, uint64_t size, ubtrfs_error **error);

/** Makes content and attributes of the file durable, and for a new file also its names. */
int ubtrfs_file_sync(ubtrfs_file *file, ubtrfs_error **error);

/** Makes the content of the file durable, and the attributes that reading it needs. */
int ubtrfs_file_sync_data(ubtrfs_file *file, ubtrfs_error **error);

/** Returns the attributes of the file, which may have no name any more. */
int ubtrfs_file_stat(ubtrfs_file *file, ubtrfs_metadata *metadata, ubtrfs_error **error);

/** Closes a file. Its changes stay, and become durable with the next commit. */
int ubtrfs_file_close(ubtrfs_file *file, ubtrfs_error **error);

/**
 * Reads the whole content of a file. Free data with ubtrfs_free. A zero byte follows the len bytes, so a text is a
 * string of C.
 */
int ubtrfs_read_file(ubtrfs_fs *fs, const char *path, void **data, size_t *len, ubtrfs_error **error);

/** Replaces the content of a file, or makes the file. */
int ubtrfs_write_file(ubtrfs_fs *fs, const char *path, const void *data, size_t len, ubtrfs_error **error);

/** Makes to a copy of the file from that shares its extents instead of copying data. */
int ubtrfs_reflink(ubtrfs_fs *fs, const char *from, const char *to, ubtrfs_error **error);

/* ---------------------------------------------------------------------------------------------
 * Directories: lists of entries
 */

/** An entry of a directory. */
typedef struct ubtrfs_dir_entry {
  /** The name, without its directory. It can have any byte except '/' and zero. */
  const char *name;
  /** The length of the name in bytes. */
  size_t name_len;
  /** The kind of file: UBTRFS_KIND_.... */
  uint32_t kind;
  /** 1 if the entry is a subvolume, otherwise 0. */
  uint32_t is_subvolume;
} ubtrfs_dir_entry;

/** Opens a directory for listing. Close it with ubtrfs_dir_close. */
int ubtrfs_dir_open(ubtrfs_fs *fs, const char *path, ubtrfs_dir **dir, ubtrfs_error **error);

/**
 * Returns the next entry, without "." and "..". entry gets a null pointer at the end. The entry is valid until the next
 * call for this directory. An iteration returns every entry once; only entries that are made or removed meanwhile may be
 * missing.
 */
int ubtrfs_dir_next(ubtrfs_dir *dir, const ubtrfs_dir_entry **entry, ubtrfs_error **error);

/** Returns the attributes of the last entry. A symbolic link is not followed. */
int ubtrfs_dir_stat(ubtrfs_dir *dir, ubtrfs_metadata *metadata, ubtrfs_error **error);

/** Closes a directory. */
int ubtrfs_dir_close(ubtrfs_dir *dir, ubtrfs_error **error);

/* ---------------------------------------------------------------------------------------------
 * Subvolumes and snapshots
 */

/** A description of a subvolume. */
typedef struct ubtrfs_subvolume {
  /** The path from the top level, without a leading slash; empty for the top level itself. */
  const char *path;
  /** The id of the subvolume; 5 for the top level. */
  uint64_t id;
  /** The id of the subvolume that has this one's name; 0 for the top level. */
  uint64_t parent_id;
  /** The generation of the last transaction that changed the subvolume. */
  uint64_t generation;
  /** The time of creation. */
  ubtrfs_time created;
  /** The UUID; zeros if the subvolume has none. */
  uint8_t uuid[16];
  /** The UUID of the source of a snapshot; zeros if the subvolume is no snapshot. */
  uint8_t parent_uuid[16];
  /** The UUID that the stream of a received subvolume has; zeros if the subvolume was not received. */
  uint8_t received_uuid[16];
  /** 1 if the subvolume is read-only, otherwise 0. */
  uint32_t is_read_only;
  /** Not used: 0. */
  uint32_t reserved;
  /** Not used: 0. */
  uint64_t more[4];
} ubtrfs_subvolume;

/** The snapshot cannot be changed. */
#define UBTRFS_SNAPSHOT_READ_ONLY 1u

/** Makes an empty subvolume. It is durable on return. */
int ubtrfs_subvolume_create(ubtrfs_fs *fs, const char *path, ubtrfs_error **error);

/**
 * Makes a snapshot at path of the subvolume at source. It is durable on return. flags is
 * UBTRFS_SNAPSHOT_READ_ONLY or 0.
 */
int ubtrfs_snapshot(ubtrfs_fs *fs, const char *source, const char *path, uint32_t flags, ubtrfs_error **error);

/** Deletes a subvolume with its content. The name is gone on return; the space is freed in the background. */
int ubtrfs_subvolume_delete(ubtrfs_fs *fs, const char *path, ubtrfs_error **error);

/** Makes a subvolume read-only if read_only is not 0, otherwise writable. The change is durable on return. */
int ubtrfs_subvolume_set_read_only(ubtrfs_fs *fs, const char *path, int read_only, ubtrfs_error **error);

/** Describes the subvolume at a path. Free subvolume with ubtrfs_free, which also frees its path. */
int ubtrfs_subvolume_info(ubtrfs_fs *fs, const char *path, ubtrfs_subvolume **subvolume, ubtrfs_error **error);

/**
 * Describes all subvolumes of the filesystem in the order of their ids, also the top level. Free the array subvolumes
 * with ubtrfs_free, which also frees its paths.
 */
int ubtrfs_subvolume_list(ubtrfs_fs *fs, ubtrfs_subvolume **subvolumes, size_t *nr_subvolumes, ubtrfs_error **error);

/** Returns the id of the subvolume that is opened if none is named. */
int ubtrfs_subvolume_default(ubtrfs_fs *fs, uint64_t *id, ubtrfs_error **error);

/** Sets the subvolume that is opened if none is named. */
int ubtrfs_subvolume_set_default(ubtrfs_fs *fs, const char *path, ubtrfs_error **error);

/* ---------------------------------------------------------------------------------------------
 * Jobs: progress, pausing, cancelling
 */

/** The progress of a job. */
typedef struct ubtrfs_progress {
  /** How much is done. The unit is the byte unless the operation says another. */
  uint64_t done;
  /** All there is to do, as far as it is known; otherwise 0. */
  uint64_t total;
  /** 1 if the job was cancelled, otherwise 0. */
  uint32_t is_cancelled;
  /** 1 if the job is paused, otherwise 0. */
  uint32_t is_paused;
} ubtrfs_progress;

/** Makes a job. Close it with ubtrfs_job_close. */
int ubtrfs_job_new(ubtrfs_job **job, ubtrfs_error **error);

/** Returns how far the operation of a job is. */
int ubtrfs_job_progress(ubtrfs_job *job, ubtrfs_progress *progress, ubtrfs_error **error);

/**
 * Waits until a job changes, at most for some milliseconds, and returns how far its operation is. It also returns early
 * without a change.
 */
int ubtrfs_job_wait(ubtrfs_job *job, uint32_t milliseconds, ubtrfs_progress *progress, ubtrfs_error **error);

/** Ends the operation of a job soon: it fails with ECANCELED, except for a scrub. A signal handler must not call this. */
int ubtrfs_job_cancel(ubtrfs_job *job);

/**
 * Pauses the operation of a job, or lets it continue if pause is 0. Balances, scrubs and changes of devices do not pause
 * by this; ubtrfs_balance_pause pauses a balance.
 */
int ubtrfs_job_pause(ubtrfs_job *job, int pause);

/** Closes a job. An operation that uses it goes on, also if it was paused. */
int ubtrfs_job_close(ubtrfs_job *job, ubtrfs_error **error);

/* ---------------------------------------------------------------------------------------------
 * Send, receive
 *
 * The functions of the program that write and read a stream are called by one thread at a time, which may be another
 * thread than the caller's. They must not call this library on the same filesystem.
 */

/** Writes all len bytes. Returns 0, or a negative errno, which ends the operation. -EINTR counts as -ECANCELED. */
typedef int (*ubtrfs_write_fn)(void *user, const void *data, size_t len);

/**
 * Reads at most len bytes, and writes their number into nr_read; 0 at the end. Returns 0, or a negative errno, which
 * ends the operation. -EINTR counts as -ECANCELED.
 */
typedef int (*ubtrfs_read_fn)(void *user, void *data, size_t len, size_t *nr_read);

/** Sends compressed extents in their compressed form. Needs version 2. */
#define UBTRFS_SEND_COMPRESSED_DATA 1u

/** Sends which ranges changed, without their data. Such a stream cannot be received. */
#define UBTRFS_SEND_NO_DATA 2u

/** Options of a send. Begin with UBTRFS_SEND_OPTIONS_INIT. */
typedef struct ubtrfs_send_options {
  /** The size of this struct. */
  size_t struct_size;
  /** UBTRFS_SEND_..., or 0. */
  uint32_t flags;
  /** The version of the stream, 1 or 2; 0 for 1. */
  uint32_t version;
  /** A read-only subvolume that the receiver has. The stream is the difference to it. Or null. */
  const char *parent;
  /** More read-only subvolumes that the receiver has; or null. */
  const char *const *clone_sources;
  /** The number of clone_sources. */
  size_t nr_clone_sources;
} ubtrfs_send_options;
#define UBTRFS_SEND_OPTIONS_INIT {sizeof(ubtrfs_send_options), 0, 0, NULL, NULL, 0}

/** Ends at the first end of a stream. Otherwise streams are received until the input ends. */
#define UBTRFS_RECEIVE_ONLY_FIRST 1u

/** Keeps an incomplete subvolume after a failure, so that a later receive of the same stream resumes it. */
#define UBTRFS_RECEIVE_KEEP 2u

/** Deletes what a killed receive of the same stream left, and begins again. */
#define UBTRFS_RECEIVE_REPLACE 4u

/** Reads each subvolume again and compares it before it becomes complete. */
#define UBTRFS_RECEIVE_VERIFY 8u

/** Shares data with the sent subvolume if this filesystem has it. */
#define UBTRFS_RECEIVE_SHARE 16u

/** Decompresses all data. */
#define UBTRFS_RECEIVE_DECOMPRESS 32u

/** Continues after any number of failed commands. Otherwise the first one ends the receive. */
#define UBTRFS_RECEIVE_ALL_ERRORS 64u

/** The result of a receive. */
typedef struct ubtrfs_receive_report {
  /** The number of received subvolumes. */
  uint64_t nr_subvolumes;
  /** Commands that were applied or failed. */
  uint64_t nr_commands;
  /** Commands that failed. */
  uint64_t nr_errors;
  /** Bytes of the input. */
  uint64_t nr_bytes;
  /** Not used: 0. */
  uint64_t more[4];
} ubtrfs_receive_report;

/**
 * Sends the read-only subvolume at path as a stream, for ubtrfs_receive or for btrfs receive. write gets the
 * bytes. options and job may be null.
 */
int ubtrfs_send(ubtrfs_fs *fs, const char *path, const ubtrfs_send_options *options, ubtrfs_write_fn write, void *user, ubtrfs_job *job, ubtrfs_error **error);

/**
 * Sends as ubtrfs_send, into a file, pipe or socket. The descriptor stays open. As write(2) does, a pipe or socket that
 * nobody reads sends SIGPIPE to the program; a program that ignores the signal gets EPIPE.
 */
int ubtrfs_send_fd(ubtrfs_fs *fs, const char *path, const ubtrfs_send_options *options, int fd, ubtrfs_job *job, ubtrfs_error **error);

/**
 * Makes the subvolumes of a stream in the directory to. read brings the bytes. The stream is not trusted: it changes
 * nothing outside of its subvolumes. flags are UBTRFS_RECEIVE_.... report and job may be null.
 */
int ubtrfs_receive(ubtrfs_fs *fs, const char *to, uint32_t flags, ubtrfs_read_fn read, void *user, ubtrfs_job *job, ubtrfs_receive_report *report, ubtrfs_error **error);

/** Receives as ubtrfs_receive, from a file, pipe or socket. The descriptor stays open. */
int ubtrfs_receive_fd(ubtrfs_fs *fs, const char *to, uint32_t flags, int fd, ubtrfs_job *job, ubtrfs_receive_report *report, ubtrfs_error **error);

/* ---------------------------------------------------------------------------------------------
 * Balance: block groups move to other places, and get other profiles
 */

/** Leaves out block groups that have the profile convert already. */
#define UBTRFS_FILTER_SOFT 1u

/**
 * Chooses block groups of one type. A block group must match everything that is set. Begin with
 * UBTRFS_BALANCE_FILTER_INIT.
 */
typedef struct ubtrfs_balance_filter {
  /** The size of this struct. */
  size_t struct_size;
  /** UBTRFS_FILTER_..., or 0. */
  uint32_t flags;
  /** The most block groups to move; 0 for any number. */
  uint32_t limit;
  /** The least used part of the block group, in percent. */
  uint32_t usage_min;
  /**
   * The used part that the block group stays below, in percent; 100 for any. If both numbers are 0, the used part does
   * not matter.
   */
  uint32_t usage_max;
  /** A device on which the block group has a part; 0 for any. */
  uint64_t devid;
  /** The begin of a range of logical addresses. */
  uint64_t range_start;
  /** The end of the range, of which the block group has a part. If both numbers are 0, the addresses do not matter. */
  uint64_t range_end;
  /** Names of profiles, of which the block group has one; or null. */
  const char *const *profiles;
  /** The number of profiles. */
  size_t nr_profiles;
  /** The profile that the block groups get: "single", "dup", "raid0", "raid1", "raid1c3", "raid1c4" or "raid10"; or null. */
  const char *convert;
} ubtrfs_balance_filter;
#define UBTRFS_BALANCE_FILTER_INIT {sizeof(ubtrfs_balance_filter), 0, 0, 0, 0, 0, 0, 0, NULL, 0, NULL}

/** Lets a conversion reduce the number of copies of metadata. */
#define UBTRFS_BALANCE_FORCE 1u

/**
 * The block groups that a balance moves. A null pointer leaves out a type of block group. If all three are null, the
 * balance moves all block groups. Begin with UBTRFS_BALANCE_OPTIONS_INIT.
 */
typedef struct ubtrfs_balance_options {
  /** The size of this struct. */
  size_t struct_size;
  /** UBTRFS_BALANCE_..., or 0. */
  uint32_t flags;
  /** Not used: 0. */
  uint32_t reserved;
  /** Block groups of data; or null. */
  const ubtrfs_balance_filter *data;
  /** Block groups of metadata; or null. */
  const ubtrfs_balance_filter *metadata;
  /** Block groups of the chunk tree; or null. */
  const ubtrfs_balance_filter *system;
} ubtrfs_balance_options;
#define UBTRFS_BALANCE_OPTIONS_INIT {sizeof(ubtrfs_balance_options), 0, 0, NULL, NULL, NULL}

/** Numbers of block groups. */
typedef struct ubtrfs_balance_counts {
  /** Block groups that the filters choose. */
  uint64_t expected;
  /** Block groups that were looked at so far. */
  uint64_t considered;
  /** Block groups that were moved. */
  uint64_t completed;
  /** Block groups that stayed, because an extent could not be moved or because there was no space. */
  uint64_t failed;
  /** Block groups among failed for which there was no space. */
  uint64_t without_space;
  /** Not used: 0. */
  uint64_t more[3];
} ubtrfs_balance_counts;

/** A file that uses an extent. */
typedef struct ubtrfs_extent_user {
  /** The id of its subvolume. */
  uint64_t subvolume_id;
  /** Its inode number. */
  uint64_t ino;
  /** A path from the top level, without a leading slash; null if the file has no name. */
  const char *path;
} ubtrfs_extent_user;

/** An extent that could not be moved. */
typedef struct ubtrfs_balance_failure {
  /** Its address. */
  uint64_t bytenr;
  /** The reason. */
  const char *reason;
  /** Files that use the extent; or null. */
  const ubtrfs_extent_user *users;
  /** The number of users. */
  size_t nr_users;
} ubtrfs_balance_failure;

/** The result of a balance. */
typedef struct ubtrfs_balance_report {
  /** Numbers of block groups by outcome. */
  ubtrfs_balance_counts counts;
  /** Extents that could not be moved; or null. */
  const ubtrfs_balance_failure *failures;
  /** The number of failures. */
  size_t nr_failures;
  /** Not used: 0. */
  uint64_t more[4];
} ubtrfs_balance_report;

/** There is no balance. */
#define UBTRFS_BALANCE_NONE 0u

/** A balance runs. */
#define UBTRFS_BALANCE_RUNS 1u

/** A balance is paused. */
#define UBTRFS_BALANCE_PAUSED 2u

/** The state of the balance of a filesystem. */
typedef struct ubtrfs_balance_state {
  /** UBTRFS_BALANCE_NONE, UBTRFS_BALANCE_RUNS or UBTRFS_BALANCE_PAUSED. */
  uint32_t state;
  /** 1 if the balance is about to end, because it was cancelled, otherwise 0. */
  uint32_t is_cancelling;
  /** 1 if the balance is about to pause, otherwise 0. */
  uint32_t is_pausing;
  /** Not used: 0. */
  uint32_t reserved;
  /** Numbers of block groups so far. */
  ubtrfs_balance_counts counts;
} ubtrfs_balance_state;

/**
 * Moves block groups to other places. What they hold takes less space afterwards, or has another profile. Fails with
 * EINPROGRESS if a balance runs or is paused, or a device is being replaced; with ECANCELED if the balance is paused or
 * cancelled. Extents that cannot be moved are in the report, which is freed with ubtrfs_free. options, job and
 * report may be null.
 */
int ubtrfs_balance(ubtrfs_fs *fs, const ubtrfs_balance_options *options, ubtrfs_job *job, ubtrfs_balance_report **report, ubtrfs_error **error);

/**
 * Continues a paused balance, also one of an earlier session, as ubtrfs_balance. Fails with ENOTCONN if no balance is
 * paused. job and report may be null.
 */
int ubtrfs_balance_resume(ubtrfs_fs *fs, ubtrfs_job *job, ubtrfs_balance_report **report, ubtrfs_error **error);

/** Pauses the balance that another thread runs, and waits until it has stopped. Fails with ENOTCONN if no balance runs. */
int ubtrfs_balance_pause(ubtrfs_fs *fs, ubtrfs_error **error);

/**
 * Ends a running or paused balance. Block groups that were moved stay in their new places. Fails with ENOTCONN if there
 * is no balance.
 */
int ubtrfs_balance_cancel(ubtrfs_fs *fs, ubtrfs_error **error);

/** Describes the balance that runs or is paused. */
int ubtrfs_balance_status(ubtrfs_fs *fs, ubtrfs_balance_state *state, ubtrfs_error **error);

/* ---------------------------------------------------------------------------------------------
 * Scrub: everything is read and compared with its checksums
 */

/** Repairs nothing. */
#define UBTRFS_SCRUB_READ_ONLY 1u

/** Options of a scrub. Begin with UBTRFS_SCRUB_OPTIONS_INIT. */
typedef struct ubtrfs_scrub_options {
  /** The size of this struct. */
  size_t struct_size;
  /** UBTRFS_SCRUB_..., or 0. */
  uint32_t flags;
  /** The number of devids. */
  uint32_t nr_devids;
  /** The ids of the devices; null for all devices that can be read. */
  const uint64_t *devids;
  /** The highest rate for each device; 0 for no limit. */
  uint64_t bytes_per_sec;
} ubtrfs_scrub_options;
#define UBTRFS_SCRUB_OPTIONS_INIT {sizeof(ubtrfs_scrub_options), 0, 0, NULL, 0}

/** What was read, and the errors. An error counts sectors. */
typedef struct ubtrfs_scrub_counts {
  /** Pieces of data extents. */
  uint64_t data_extents;
  /** Tree blocks. */
  uint64_t tree_blocks;
  /** Bytes of data. */
  uint64_t data_bytes;
  /** Bytes of tree blocks. */
  uint64_t tree_bytes;
  /** Sectors that could not be read. */
  uint64_t read_errors;
  /** Sectors of data that contradict their checksums. */
  uint64_t csum_errors;
  /** Sectors of tree blocks with a wrong checksum, address or generation. */
  uint64_t verify_errors;
  /** Sectors without checksums, which are no errors. */
  uint64_t nr_without_csum;
  /** Superblocks that are bad or old. */
  uint64_t super_errors;
  /** Errors without a good copy. */
  uint64_t uncorrectable_errors;
  /** Errors with a good copy elsewhere, from which they are repaired, unless nothing is repaired. */
  uint64_t corrected_errors;
  /** Up to this offset of the device, everything was checked. */
  uint64_t last_physical;
  /** Not used: 0. */
  uint64_t more[4];
} ubtrfs_scrub_counts;

/** A device that was scrubbed. */
typedef struct ubtrfs_scrubbed_device {
  /** The id of the device. */
  uint64_t devid;
  /** What was read on the device. */
  ubtrfs_scrub_counts counts;
  /** Why the scrub of the device did not end normally; null if it did. */
  const char *message;
  /** 0 if everything was checked, -ECANCELED if the scrub was cancelled, or another negative errno. */
  int status;
  /** Not used: 0. */
  uint32_t reserved;
} ubtrfs_scrubbed_device;

/** A file with bad data. */
typedef struct ubtrfs_damaged_file {
  /** The id of its subvolume. */
  uint64_t subvolume_id;
  /** Its inode number. */
  uint64_t ino;
  /** A path from the top level, without a leading slash; null if the file has no name. */
  const char *path;
  /** Bytes that were repaired from a good copy, or that have a good copy if nothing is repaired. */
  uint64_t repaired_bytes;
  /** Bytes without a good copy. */
  uint64_t lost_bytes;
} ubtrfs_damaged_file;

/** The result of a scrub. */
typedef struct ubtrfs_scrub_report {
  /** The devices. */
  const ubtrfs_scrubbed_device *devices;
  /** The number of devices. */
  size_t nr_devices;
  /** Files with bad data, at most 1000; or null. */
  const ubtrfs_damaged_file *files;
  /** The number of files. */
  size_t nr_files;
  /** Bytes of tree blocks that were repaired, or that have a good copy if nothing is repaired. */
  uint64_t repaired_block_bytes;
  /** Bytes of tree blocks without a good copy. */
  uint64_t lost_block_bytes;
  /** Not used: 0. */
  uint64_t more[4];
} ubtrfs_scrub_report;

/**
 * Reads everything on the devices, and repairs what is bad and has a good copy. The report names files with bad data,
 * and how each device ended. Free it with ubtrfs_free. Bad data is no failure of this function. Nor is a cancelled
 * scrub: the devices of its report have the status -ECANCELED. Fails with EINPROGRESS if a device is being scrubbed.
 * options and job may be null.
 */
int ubtrfs_scrub(ubtrfs_fs *fs, const ubtrfs_scrub_options *options, ubtrfs_job *job, ubtrfs_scrub_report **report, ubtrfs_error **error);

/** Ends the scrubs that other threads run, and waits until they have ended. Fails with ENOTCONN if no scrub runs. */
int ubtrfs_scrub_cancel(ubtrfs_fs *fs, ubtrfs_error **error);

/* ---------------------------------------------------------------------------------------------
 * Devices of an open filesystem: adding, removing, replacing, sizes
 *
 * Devices have ids, which `ubtrfs_space` lists. A new device is given by its handle: that of an image file or block device
 * (`ubtrfs_device_open`, `ubtrfs_device_create`), or that of storage of the program (`ubtrfs_device_new`). The filesystem
 * keeps the device, so its handle may be closed afterwards. A device that a filesystem uses must not be given again.
 */

/** The result of a replacement. */
typedef struct ubtrfs_replace_report {
  /** What was read, and the errors. */
  ubtrfs_scrub_counts counts;
  /** Files with data that has no good copy, at most 1000; or null. */
  const ubtrfs_damaged_file *files;
  /** The number of files. */
  size_t nr_files;
  /** Bytes of tree blocks without a good copy. */
  uint64_t lost_block_bytes;
  /** Not used: 0. */
  uint64_t more[3];
} ubtrfs_replace_report;

/**
 * Adds a device, and returns its id in devid, which may be null. Everything on the device is lost. New block groups use
 * it at once; what there is stays where it is until a balance. job may be null.
 */
int ubtrfs_add_device(ubtrfs_fs *fs, ubtrfs_device *device, ubtrfs_job *job, uint64_t *devid, ubtrfs_error **error);

/**
 * Moves everything on some devices to the others, and removes these devices. Fails with ENOSPC if the others have not
 * enough space, and with EINVAL if a profile needs more devices. After a failure, what was moved stays in its new place.
 * job may be null.
 */
int ubtrfs_remove_devices(ubtrfs_fs *fs, const uint64_t *devids, size_t nr_devids, ubtrfs_job *job, ubtrfs_error **error);

/**
 * Copies a device to a new one, which takes its place and its id. Content that is bad on the old device, or is missing with
 * it, comes from the others. Everything on the new device is lost. If it is larger, ubtrfs_resize_device uses its rest.
 * Free report with ubtrfs_free. job and report may be null.
 */
int ubtrfs_replace_device(ubtrfs_fs *fs, uint64_t devid, ubtrfs_device *device, ubtrfs_job *job, ubtrfs_replace_report **report, ubtrfs_error **error);

/** Sets the bytes of a device that the filesystem uses. What lies behind them moves first. job may be null. */
int ubtrfs_resize_device(ubtrfs_fs *fs, uint64_t devid, uint64_t size, ubtrfs_job *job, ubtrfs_error **error);

/** Returns the smallest size to which ubtrfs_resize_device surely shrinks a device. */
int ubtrfs_min_device_size(ubtrfs_fs *fs, uint64_t devid, uint64_t *size, ubtrfs_error **error);

/* ---------------------------------------------------------------------------------------------
 * Space by kind and device; label; trim
 */

/** All block groups of one type and profile. */
typedef struct ubtrfs_group_usage {
  /** The type: "data", "metadata", "system" or "data+metadata". */
  const char *kind;
  /** The profile, such as "raid1". */
  const char *profile;
  /** Type and profile as on disk. */
  uint64_t flags;
  /** Bytes in the block groups. Each copy on the devices takes as many. */
  uint64_t total_bytes;
  /** Bytes of extents. */
  uint64_t used_bytes;
} ubtrfs_group_usage;

/** The space of the block groups of one type and profile on a device. */
typedef struct ubtrfs_device_share {
  /** The type, as in ubtrfs_group_usage. */
  const char *kind;
  /** The profile. */
  const char *profile;
  /** Type and profile as on disk. */
  uint64_t flags;
  /** The number of stripes of each of the block groups. */
  uint64_t nr_stripes;
  /** Bytes on the device. */
  uint64_t bytes;
} ubtrfs_device_share;

/** The device has everything that was committed. */
#define UBTRFS_MEMBER_IN_SYNC 1u

/** The device has everything up to generation for sure, and is being brought up to date. */
#define UBTRFS_MEMBER_LATE 2u

/** The device has everything up to generation, but missed later commits. */
#define UBTRFS_MEMBER_STALE 3u

/** The device was not given. */
#define UBTRFS_MEMBER_MISSING 4u

/** The device failed while the filesystem was open, and is not used any more. */
#define UBTRFS_MEMBER_FAILED 5u

/** A device of a filesystem. */
typedef struct ubtrfs_device_usage {
  /** Its id. */
  uint64_t devid;
  /** Its UUID. */
  uint8_t uuid[16];
  /** Its path or name; null if it is missing. */
  const char *path;
  /** UBTRFS_MEMBER_.... */
  uint32_t state;
  /** 1 if it is a device of a seed, which is only read, otherwise 0. */
  uint32_t is_seed;
  /** The generation for UBTRFS_MEMBER_LATE and UBTRFS_MEMBER_STALE, otherwise 0. */
  uint64_t generation;
  /** Bytes that the filesystem uses, allocated or not. */
  uint64_t total_bytes;
  /** Bytes of the device past total_bytes. */
  uint64_t slack_bytes;
  /** Bytes that are allocated to block groups. */
  uint64_t allocated_bytes;
  /** What is allocated, by type and profile; or null. */
  const ubtrfs_device_share *shares;
  /** The number of shares. */
  size_t nr_shares;
  /** Not used: 0. */
  uint64_t more[4];
} ubtrfs_device_usage;

/** The space of a filesystem by type and profile of block groups, and by device. */
typedef struct ubtrfs_space_report {
  /** Block groups by type and profile. */
  const ubtrfs_group_usage *groups;
  /** The number of groups. */
  size_t nr_groups;
  /** The devices in the order of their ids, also missing ones. */
  const ubtrfs_device_usage *devices;
  /** The number of devices. */
  size_t nr_devices;
  /** The bytes of metadata that are kept for emergencies. */
  uint64_t reserve_bytes;
  /** How much of reserve_bytes is in use. */
  uint64_t reserve_used_bytes;
  /** Not used: 0. */
  uint64_t more[4];
} ubtrfs_space_report;

/** Describes how the space is used. Free space with ubtrfs_free. */
int ubtrfs_space(ubtrfs_fs *fs, ubtrfs_space_report **space, ubtrfs_error **error);

/** Sets the label: at most 255 bytes. An empty label removes the old one. */
int ubtrfs_set_label(ubtrfs_fs *fs, const char *label, ubtrfs_error **error);

/**
 * Tells the devices which space is free. Free ranges of fewer than min_bytes are left out. bytes, which may be null,
 * gets the number of bytes that the devices were told. Fails with EOPNOTSUPP if no device takes discards. job may be
 * null.
 */
int ubtrfs_trim(ubtrfs_fs *fs, uint64_t min_bytes, ubtrfs_job *job, uint64_t *bytes, ubtrfs_error **error);

/* ---------------------------------------------------------------------------------------------
 * Quotas: numbers and limits of subvolumes and of groups of them
 *
 * The id of a quota group has the level in its upper 16 bits, and a number in its lower 48 bits. A group of level 0 belongs
 * to a subvolume, and its id is the id of the subvolume. The group 1/100 has the id `(UINT64_C(1) << 48) + 100`.
 */

/** Quotas are off. */
#define UBTRFS_QUOTA_OFF 0u

/** An extent counts for all subvolumes that use it. */
#define UBTRFS_QUOTA_FULL 1u

/** An extent counts for the subvolume that allocated it. Extents that exist already are not counted. */
#define UBTRFS_QUOTA_SIMPLE 2u

/** As a limit: none. */
#define UBTRFS_NO_LIMIT UINT64_C(0xffffffffffffffff)

/** The state of quotas. */
typedef struct ubtrfs_quota_state {
  /** UBTRFS_QUOTA_OFF, UBTRFS_QUOTA_FULL or UBTRFS_QUOTA_SIMPLE. */
  uint32_t kind;
  /** 1 if the numbers are right, otherwise 0. */
  uint32_t is_consistent;
  /** 1 while all extents are being counted, otherwise 0. */
  uint32_t is_counting;
  /** Not used: 0. */
  uint32_t reserved;
  /** The address up to which extents were counted, while is_counting. */
  uint64_t counted_up_to;
  /** Not used: 0. */
  uint64_t more[2];
} ubtrfs_quota_state;

/** A quota group. */
typedef struct ubtrfs_qgroup {
  /** Its id. */
  uint64_t id;
  /** Bytes of all extents that the group refers to. */
  uint64_t referenced;
  /** Bytes of the extents that nothing else refers to. */
  uint64_t exclusive;
  /** The limit of referenced, or UBTRFS_NO_LIMIT. */
  uint64_t max_referenced;
  /** The limit of exclusive, or UBTRFS_NO_LIMIT. */
  uint64_t max_exclusive;
  /** The ids of the groups that the group belongs to; or null. */
  const uint64_t *parents;
  /** The number of parents. */
  size_t nr_parents;
  /** The ids of the groups that belong to the group; or null. */
  const uint64_t *members;
  /** The number of members. */
  size_t nr_members;
  /** Not used: 0. */
  uint64_t more[3];
} ubtrfs_qgroup;

/**
 * Switches quotas on. kind is UBTRFS_QUOTA_FULL or UBTRFS_QUOTA_SIMPLE. Full quotas count all extents in the
 * background, for which ubtrfs_quota_wait waits.
 */
int ubtrfs_quota_enable(ubtrfs_fs *fs, uint32_t kind, ubtrfs_error **error);

/** Switches quotas off. All groups and limits are lost. */
int ubtrfs_quota_disable(ubtrfs_fs *fs, ubtrfs_error **error);

/** Describes the state of quotas. */
int ubtrfs_quota_status(ubtrfs_fs *fs, ubtrfs_quota_state *state, ubtrfs_error **error);

/** Begins to count all extents again, in the background. */
int ubtrfs_quota_rescan(ubtrfs_fs *fs, ubtrfs_error **error);

/** Waits until all extents are counted. Cancelling job ends only the wait. job may be null. */
int ubtrfs_quota_wait(ubtrfs_fs *fs, ubtrfs_job *job, ubtrfs_error **error);

/**
 * Lists all quota groups by id, with the numbers of the last commit. Fails with ENOTCONN if quotas are off. Free the array
 * qgroups with ubtrfs_free.
 */
int ubtrfs_qgroup_list(ubtrfs_fs *fs, ubtrfs_qgroup **qgroups, size_t *nr_qgroups, ubtrfs_error **error);

/** Makes a quota group of level 1 or higher. Groups of level 0 are made with their subvolumes. */
int ubtrfs_qgroup_create(ubtrfs_fs *fs, uint64_t id, ubtrfs_error **error);

/** Removes a quota group. Fails with EBUSY if it has members or belongs to a subvolume. */
int ubtrfs_qgroup_destroy(ubtrfs_fs *fs, uint64_t id, ubtrfs_error **error);

/**
 * Makes a group a member of another one of a higher level. needs_rescan, which may be null, gets 1 if the numbers are
 * wrong until ubtrfs_quota_rescan has counted all extents, otherwise 0.
 */
int ubtrfs_qgroup_assign(ubtrfs_fs *fs, uint64_t member, uint64_t parent, int *needs_rescan, ubtrfs_error **error);

/** Ends what ubtrfs_qgroup_assign began. needs_rescan is as there. */
int ubtrfs_qgroup_remove(ubtrfs_fs *fs, uint64_t member, uint64_t parent, int *needs_rescan, ubtrfs_error **error);

/**
 * Sets both limits of a group: bytes of all extents that it refers to, and bytes that only it refers to, or
 * UBTRFS_NO_LIMIT. Writes beyond a limit fail with EDQUOT.
 */
int ubtrfs_qgroup_limit(ubtrfs_fs *fs, uint64_t id, uint64_t max_referenced, uint64_t max_exclusive, ubtrfs_error **error);

/* ---------------------------------------------------------------------------------------------
 * Extents of files: defragmenting, sharing
 */

/** Also rewrites extents that snapshots or other files share. The file then takes additional space. */
#define UBTRFS_DEFRAGMENT_UNSHARE 1u

/** Options of a defragmentation. Begin with UBTRFS_DEFRAGMENT_OPTIONS_INIT. */
typedef struct ubtrfs_defragment_options {
  /** The size of this struct. */
  size_t struct_size;
  /** UBTRFS_DEFRAGMENT_..., or 0. */
  uint32_t flags;
  /** Not used: 0. */
  uint32_t reserved;
  /** The begin of the range to defragment. */
  uint64_t start;
  /** The end of the range; 0 for the end of the file. */
  uint64_t end;
  /** Extents of at least so many bytes stay as they are, unless they are to be compressed; 0 for 32 MiB. */
  uint64_t small_bytes;
  /** Compresses what is rewritten: "zlib", "lzo" or "zstd", with a level such as "zstd:9"; or null. */
  const char *compress;
} ubtrfs_defragment_options;
#define UBTRFS_DEFRAGMENT_OPTIONS_INIT {sizeof(ubtrfs_defragment_options), 0, 0, 0, 0, 0, NULL}

/**
 * Joins the small extents of a file, and compresses them if the options say so. rewritten, which may be null, gets the
 * number of bytes that were rewritten. The content is intact after every failure. options and job may be null.
 */
int ubtrfs_defragment(ubtrfs_fs *fs, const char *path, const ubtrfs_defragment_options *options, ubtrfs_job *job, uint64_t *rewritten, ubtrfs_error **error);

/**
 * Makes a range of file share the extents of a range of source instead of copying its data. Both ranges begin at
 * multiples of the sector size. len is such a multiple too, or ends at the end of source; 0 means up to its end. Fails
 * with EBADF if file is not open for writing or source not for reading, and with EXDEV if they are files of different
 * filesystems.
 */
int ubtrfs_file_clone_range(ubtrfs_file *file, uint64_t offset, ubtrfs_file *source, uint64_t source_offset, uint64_t len, ubtrfs_error **error);

/**
 * Compares a range of file with a range of source, and makes them share extents if they are equal. are_equal gets 1
 * if they are, otherwise 0. Ranges and files are as for ubtrfs_file_clone_range. job may be null.
 */
int ubtrfs_file_dedupe_range(ubtrfs_file *file, uint64_t offset, ubtrfs_file *source, uint64_t source_offset, uint64_t len, ubtrfs_job *job, int *are_equal, ubtrfs_error **error);

/* ---------------------------------------------------------------------------------------------
 * Check
 */

/** A problem that a check found. */
typedef struct ubtrfs_problem {
  /** The code, such as "E-BLOCK-CSUM". Codes that begin with "W-" are warnings. */
  const char *code;
  /** The problem with its code and place, in a line. */
  const char *text;
  /** The tree of the problem; 0 if it has none. */
  uint64_t tree;
  /** The address of the tree block or extent; 0 if the problem has none. */
  uint64_t bytenr;
  /** 1 for damage, 0 for a warning. */
  uint32_t is_error;
  /** Not used: 0. */
  uint32_t reserved;
} ubtrfs_problem;

/** Learns of a problem. The problem is valid until the function returns. */
typedef void (*ubtrfs_problem_fn)(void *user, const ubtrfs_problem *problem);

/** Reads all data, and compares every copy with its checksums. */
#define UBTRFS_CHECK_DATA 1u

/** The result of a check. */
typedef struct ubtrfs_check_report {
  /** 1 if all parts of the check ran and found no damage, otherwise 0. */
  uint32_t is_clean;
  /** 1 if all parts of the check ran, otherwise 0. */
  uint32_t is_complete;
  /** Problems that are damage, also those that were not told. */
  uint64_t nr_errors;
  /** Problems that are warnings, also those that were not told. */
  uint64_t nr_warnings;
  /** The number of trees. */
  uint64_t nr_trees;
  /** The number of tree blocks. */
  uint64_t nr_tree_blocks;
  /** The number of data extents. */
  uint64_t nr_data_extents;
  /** The number of inodes. */
  uint64_t nr_inodes;
  /** Bytes of data that were compared with their checksums. */
  uint64_t data_bytes_verified;
} ubtrfs_check_report;

/**
 * Checks the filesystem on image files or block devices, without changing it. Problems are no failure of this function;
 * see the report. The function fails if nothing can be checked. The job counts the bytes that were read; how many there
 * are is not known. tell, job and report may be null.
 */
int ubtrfs_check(const char *const *paths, size_t nr_paths, uint32_t flags, ubtrfs_problem_fn tell, void *user, ubtrfs_job *job, ubtrfs_check_report *report, ubtrfs_error **error);

/** Checks the filesystem on devices of the program, as ubtrfs_check. */
int ubtrfs_check_devices(ubtrfs_device *const *devices, size_t nr_devices, uint32_t flags, ubtrfs_problem_fn tell, void *user, ubtrfs_job *job, ubtrfs_check_report *report, ubtrfs_error **error);

/* ---------------------------------------------------------------------------------------------
 * Archives: tar
 *
 * Archives are read compressed and uncompressed, and written uncompressed. The functions of the program keep the rules for
 * streams.
 */

/** Learns that a member or file is left out or incomplete, by a text that is valid until the function returns. */
typedef void (*ubtrfs_message_fn)(void *user, const char *text);

/** The archive is a layer of an OCI image, whose whiteouts remove existing files. */
#define UBTRFS_IMPORT_OCI_LAYER 1u

/** All files belong to uid and gid in place of the owners in the archive. */
#define UBTRFS_IMPORT_OWNER 2u

/** Options of an import. Begin with UBTRFS_IMPORT_OPTIONS_INIT. */
typedef struct ubtrfs_import_options {
  /** The size of this struct. */
  size_t struct_size;
  /** UBTRFS_IMPORT_..., or 0. */
  uint32_t flags;
  /** The number of leading names to remove from each path. */
  uint32_t strip_components;
  /** The owner of all files, with UBTRFS_IMPORT_OWNER. */
  uint32_t uid;
  /** The group of all files, with UBTRFS_IMPORT_OWNER. */
  uint32_t gid;
  /** Patterns of members that are left out, such as "*.o"; or null. */
  const char *const *exclude;
  /** The number of exclude. */
  size_t nr_exclude;
  /** Learns what is left out; or null. */
  ubtrfs_message_fn tell;
  /** The first argument of tell. */
  void *tell_user;
} ubtrfs_import_options;
#define UBTRFS_IMPORT_OPTIONS_INIT {sizeof(ubtrfs_import_options), 0, 0, 0, 0, NULL, 0, NULL, NULL}

/** Keeps holes of files as holes. */
#define UBTRFS_EXPORT_SPARSE 1u

/** Leaves out extended attributes and ACLs. */
#define UBTRFS_EXPORT_NO_XATTRS 2u

/** Options of an export. Begin with UBTRFS_EXPORT_OPTIONS_INIT. */
typedef struct ubtrfs_export_options {
  /** The size of this struct. */
  size_t struct_size;
  /** UBTRFS_EXPORT_..., or 0. */
  uint32_t flags;
  /** Not used: 0. */
  uint32_t reserved;
  /** Learns what is left out; or null. */
  ubtrfs_message_fn tell;
  /** The first argument of tell. */
  void *tell_user;
} ubtrfs_export_options;
#define UBTRFS_EXPORT_OPTIONS_INIT {sizeof(ubtrfs_export_options), 0, 0, NULL, NULL}

/** The result of an import or an export. */
typedef struct ubtrfs_archive_report {
  /** Unpacked members; 0 for an export. */
  uint64_t nr_members;
  /** Unpacked regular files; 0 for an export. */
  uint64_t nr_files;
  /** Bytes of file data. */
  uint64_t nr_bytes;
  /** Members or files that are left out or incomplete. */
  uint64_t nr_failed;
  /** Not used: 0. */
  uint64_t more[4];
} ubtrfs_archive_report;

/**
 * Unpacks an archive into the directory to, which is made if it does not exist. read brings the bytes, compressed or
 * not. A member that cannot be unpacked is left out, and counts as failed. options and report may be null.
 */
int ubtrfs_import(ubtrfs_fs *fs, const char *to, const ubtrfs_import_options *options, ubtrfs_read_fn read, void *user, ubtrfs_archive_report *report, ubtrfs_error **error);

/** Unpacks as ubtrfs_import, from a file, pipe or socket. The descriptor stays open. */
int ubtrfs_import_fd(ubtrfs_fs *fs, const char *to, const ubtrfs_import_options *options, int fd, ubtrfs_archive_report *report, ubtrfs_error **error);

/**
 * Writes the directory or file from as an archive. write gets the bytes. A file that cannot be read is left out, and
 * counts as failed. options and report may be null.
 */
int ubtrfs_export(ubtrfs_fs *fs, const char *from, const ubtrfs_export_options *options, ubtrfs_write_fn write, void *user, ubtrfs_archive_report *report, ubtrfs_error **error);

/** Writes as ubtrfs_export, into a file, pipe or socket. The descriptor stays open. SIGPIPE: see ubtrfs_send_fd. */
int ubtrfs_export_fd(ubtrfs_fs *fs, const char *from, const ubtrfs_export_options *options, int fd, ubtrfs_archive_report *report, ubtrfs_error **error);

#ifdef __cplusplus
}
#endif

#endif
