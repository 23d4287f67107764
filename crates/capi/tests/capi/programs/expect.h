/*
 * What the test programs expect of calls. The first result that differs ends the program.
 */
#include <stdio.h>
#include <stdlib.h>
#include <ubtrfs.h>

#define EXPECT(condition)                                                      \
  do {                                                                         \
    if (!(condition)) {                                                        \
      fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);  \
      exit(1);                                                                 \
    }                                                                          \
  } while (0)

static ubtrfs_error *error;

/* Expects a success. */
#define OK(call)                                                               \
  do {                                                                         \
    int status_ = (call);                                                      \
    if (status_ != 0) {                                                        \
      fprintf(stderr, "%s:%d: %s: %d: %s\n", __FILE__, __LINE__, #call, status_, ubtrfs_error_message(error)); \
      exit(1);                                                                 \
    }                                                                          \
    EXPECT(error == NULL);                                                     \
  } while (0)

/* Expects a failure with a number and a kind, and frees its error. */
#define FAILS(errno_, kind_, call)                                             \
  do {                                                                         \
    int status_ = (call);                                                      \
    if (status_ != -(errno_) || ubtrfs_error_errno(error) != (errno_) || ubtrfs_error_kind(error) != (kind_)) { \
      fprintf(stderr, "%s:%d: %s: %d, kind %u: %s\n", __FILE__, __LINE__, #call, status_, ubtrfs_error_kind(error), \
              ubtrfs_error_message(error));                                    \
      exit(1);                                                                 \
    }                                                                          \
    EXPECT(ubtrfs_error_message(error)[0] != 0);                               \
    EXPECT(ubtrfs_error_free(error) == 0);                                     \
  } while (0)

/* Expects a failure, and frees its error. */
#define FAILS_SOMEHOW(call)                                                    \
  do {                                                                         \
    EXPECT((call) < 0 && ubtrfs_error_errno(error) > 0);                       \
    EXPECT(ubtrfs_error_free(error) == 0);                                     \
  } while (0)
