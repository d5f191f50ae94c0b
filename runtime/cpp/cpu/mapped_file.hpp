// A read-only file in memory; pages come in when they are read.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>

namespace trtree::cpu {

class MappedFile {
 public:
  // Throws std::runtime_error, naming the file and the cause.
  explicit MappedFile(const std::string& path) {
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) throw std::runtime_error(path + ": " + std::strerror(errno));
    struct stat status {};
    if (::fstat(file, &status) == 0 && status.st_size > 0) {
      size_ = static_cast<size_t>(status.st_size);
      data_ = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file, 0);
    }
    const int error = errno;
    ::close(file);
    if (data_ == MAP_FAILED) throw std::runtime_error(path + ": " + std::strerror(error));
  }
  ~MappedFile() { ::munmap(data_, size_); }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const uint8_t> bytes() const { return {static_cast<const uint8_t*>(data_), size_}; }

 private:
  void* data_ = MAP_FAILED;
  size_t size_ = 0;
};

}  // namespace trtree::cpu
