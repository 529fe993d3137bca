// Every stored format, in the order of CodecId.
#pragma once

#include "kernels/codecs/constant.hpp"
#include "kernels/codecs/index_fp4.hpp"
#include "kernels/codecs/nvfp4.hpp"
#include "kernels/codecs/plain.hpp"
#include "kernels/codecs/scaled.hpp"

#define KVPOOL_CODEC_TABLE                                                          \
  {                                                                                 \
      functions_of<CodecId::fp32>(),       functions_of<CodecId::fp16>(),           \
      functions_of<CodecId::bf16>(),       functions_of<CodecId::fp8>(),            \
      functions_of<CodecId::fp8_tensor>(), functions_of<CodecId::fp8e5m2_tensor>(), \
      functions_of<CodecId::int8>(),       functions_of<CodecId::int8_tensor>(),    \
      functions_of<CodecId::nvfp4>(),      functions_of<CodecId::nvfp4_token>(),    \
      functions_of<CodecId::index_fp8>(),  functions_of<CodecId::index_fp4>()}
