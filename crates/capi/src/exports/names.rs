//! Names: directories, links, removal

use std::ffi::{c_char, c_int};
use std::os::unix::ffi::OsStringExt;

use crate::border::{ErrorPlace, OwnedAddress, ResultPlace, Text};
use crate::exports::filesystem::UbtrfsFs;
use crate::failure::answer;
use crate::handles::Handle;
use crate::memory::give_text;

/// Makes a directory with the permissions 0777 without the umask of the handle, and 0755 for a handle without one.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_mkdir(fs: Handle<UbtrfsFs>, path: Text, error: ErrorPlace) -> c_int {
    answer(error, || Ok(fs.get()?.create_dir(path.path("path")?)?))
}

/// Makes a directory and its missing parents. Succeeds if the directory exists.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_mkdir_all(fs: Handle<UbtrfsFs>, path: Text, error: ErrorPlace) -> c_int {
    answer(error, || Ok(fs.get()?.create_dir_all(path.path("path")?)?))
}

/// Renames a file or directory, and replaces an existing `to`, like rename(2).
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_rename(fs: Handle<UbtrfsFs>, from: Text, to: Text, error: ErrorPlace) -> c_int {
    answer(error, || Ok(fs.get()?.rename(from.path("from")?, to.path("to")?)?))
}

/// Removes a name that is not a directory. The content of an open file remains until the file is closed.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_unlink(fs: Handle<UbtrfsFs>, path: Text, error: ErrorPlace) -> c_int {
    answer(error, || Ok(fs.get()?.remove_file(path.path("path")?)?))
}

/// Removes an empty directory.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_rmdir(fs: Handle<UbtrfsFs>, path: Text, error: ErrorPlace) -> c_int {
    answer(error, || Ok(fs.get()?.remove_dir(path.path("path")?)?))
}

/// Removes a directory with its content. Symbolic links are not followed. A subvolume with files in it is an error.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_remove_all(fs: Handle<UbtrfsFs>, path: Text, error: ErrorPlace) -> c_int {
    answer(error, || Ok(fs.get()?.remove_dir_all(path.path("path")?)?))
}

/// Makes another name for a file.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_link(fs: Handle<UbtrfsFs>, original: Text, link: Text, error: ErrorPlace) -> c_int {
    answer(error, || Ok(fs.get()?.hard_link(original.path("original")?, link.path("link")?)?))
}

/// Makes a symbolic link to `target`, which can be any path.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_symlink(fs: Handle<UbtrfsFs>, target: Text, link: Text, error: ErrorPlace) -> c_int {
    answer(error, || Ok(fs.get()?.symlink(target.path("target")?, link.path("link")?)?))
}

/// Makes a FIFO, a socket or a device file. `mode` has the type (`S_IFIFO`, `S_IFSOCK`, `S_IFCHR` or `S_IFBLK` of
/// sys/stat.h) and the permissions. `major` and `minor` are the number of a device file.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_mknod(
    fs: Handle<UbtrfsFs>,
    path: Text,
    mode: u32,
    major: u32,
    minor: u32,
    error: ErrorPlace,
) -> c_int {
    answer(error, || Ok(fs.get()?.make_node(path.path("path")?, mode, (major, minor))?))
}

/// Returns the target of a symbolic link. Free it with `ubtrfs_free`.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_readlink(
    fs: Handle<UbtrfsFs>,
    path: Text,
    target: ResultPlace<OwnedAddress<c_char>>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        target.set(OwnedAddress::NULL);
        target.needed("the place for the target")?;
        let found = fs.get()?.read_link(path.path("path")?)?;
        target.set(give_text(found.into_os_string().into_vec()));
        Ok(())
    })
}

/// Writes 1 into `exists` if the path exists, otherwise 0. Symbolic links are followed.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_exists(
    fs: Handle<UbtrfsFs>,
    path: Text,
    exists: ResultPlace<c_int>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        exists.needed("exists")?;
        exists.set(fs.get()?.try_exists(path.path("path")?)?.into());
        Ok(())
    })
}
