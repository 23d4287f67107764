//! Writes the manual pages and the shell completions of every command below a directory: `man1/`, `bash/`, `zsh/`,
//! `fish/`. Their source is the definition of the commands, as for `--help`. `scripts/install` calls this program.

use std::path::PathBuf;
use std::{env, fs, io};

use clap_complete::Shell;

fn main() -> io::Result<()> {
    let Some(dir) = env::args_os().nth(1).map(PathBuf::from) else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "give the directory for the pages"));
    };
    let command = ubtrfs_cli::definition();
    let pages = dir.join("man1");
    fs::create_dir_all(&pages)?;
    clap_mangen::generate_to(command.clone(), &pages)?;
    for (shell, name) in [(Shell::Bash, "bash"), (Shell::Zsh, "zsh"), (Shell::Fish, "fish")] {
        let scripts = dir.join(name);
        fs::create_dir_all(&scripts)?;
        clap_complete::generate_to(shell, &mut command.clone(), "ubtrfs", &scripts)?;
    }
    Ok(())
}
