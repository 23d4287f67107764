//! Writes the manual pages and the shell completions of every command, and the page on mount options, below a directory:
//! `man1/`, `man5/`, `bash/`, `zsh/`, `fish/`. Their source is the definition of the commands, as for `--help`. `scripts/install` calls this program.

use std::path::PathBuf;
use std::{env, fs, io};

use clap_complete::Shell;
use clap_mangen::roff::{Roff, bold, roman};
use ubtrfs_cli::mount_options::{MountOption, OF_BTRFS, OF_MOUNT_POINT};

fn main() -> io::Result<()> {
    let Some(dir) = env::args_os().nth(1).map(PathBuf::from) else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "give the directory for the pages"));
    };
    let command = ubtrfs_cli::definition();
    let pages = dir.join("man1");
    fs::create_dir_all(&pages)?;
    clap_mangen::generate_to(command.clone(), &pages)?;
    fs::create_dir_all(dir.join("man5"))?;
    fs::write(dir.join("man5/ubtrfs.5"), options_page())?;
    for (shell, name) in [(Shell::Bash, "bash"), (Shell::Zsh, "zsh"), (Shell::Fish, "fish")] {
        let scripts = dir.join(name);
        fs::create_dir_all(&scripts)?;
        clap_complete::generate_to(shell, &mut command.clone(), "ubtrfs", &scripts)?;
    }
    Ok(())
}

/// The manual page ubtrfs(5).
fn options_page() -> String {
    let mut page = Roff::new();
    let version = format!("ubtrfs {}", env!("CARGO_PKG_VERSION"));
    page.control("TH", ["ubtrfs", "5", "", version.as_str()]);
    page.control("SH", ["NAME"]).text([roman("ubtrfs - mount options")]);
    page.control("SH", ["DESCRIPTION"]);
    page.text([roman(
        "These options follow -o of ubtrfs-mount(1) and of mount(8), and stand in the fourth field of fstab(5):",
    )]);
    page.control("PP", [])
        .text([roman("/srv/images/data.img  /srv/data  ubtrfs  subvol=@data,compress=zstd:3,nofail  0  0")]);
    page.control("PP", []).text([roman("An unknown option is an error. A later option overrides an earlier one.")]);
    for (title, options) in [("OPTIONS OF BTRFS", OF_BTRFS), ("OPTIONS OF THE MOUNT POINT", OF_MOUNT_POINT)] {
        page.control("SH", [title]);
        for MountOption { names, text } in options {
            page.control("TP", []).text([bold(*names)]).text([roman(*text)]);
        }
    }
    page.control("SH", ["REMOUNT"]);
    page.text([roman(
        "mount -o remount changes ro, rw, dev, suid, exec, atime, dirsync and their opposites. Other options must have the \
         values of the mount.",
    )]);
    page.control("SH", ["SEE ALSO"]).text([roman("ubtrfs(1), ubtrfs-mount(1), ubtrfs-umount(1), mount(8), fstab(5)")]);
    page.to_roff()
}
